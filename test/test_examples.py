"""The examples: each runs in a fresh process, and what it claims is checked."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from helpers import run_script

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
COVERED = {"jax_quickstart.py", "quickstart.py", "train_digits.py"}

# The example itself, as a script of its own process: `run_script` takes source.
RUN = """
    import runpy, sys

    path = sys.argv.pop(1)
    sys.argv[0] = path
    sys.path.insert(0, path.rpartition("/")[0])
    runpy.run_path(path, run_name="__main__")
"""
STEPS = 6
# The largest matrix has 41 MB, which malloc gives back to the system as soon as it is freed; the state has 125 MB.
HIDDEN = 3200


def run_example(name: str, *args: str, timeout: float, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
    return run_script(RUN, str(EXAMPLES / name), *args, timeout=timeout, exit_code=exit_code)


def test_every_example_is_covered_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("_")} == COVERED


def test_the_quickstart_shows_the_pointer_the_error_and_the_report() -> None:
    output = run_example("quickstart.py", timeout=120).stdout
    line = next(
        number
        for number, text in enumerate((EXAMPLES / "quickstart.py").read_text(encoding="utf-8").splitlines(), start=1)
        if text.startswith("donate_buffer(")
    )
    pointer, error, report = output.split("\n", maxsplit=2)
    assert pointer == "in the same memory: True"
    assert error.startswith("error: f32[1024,1024] tensor has no buffer any more")
    assert f"donated at quickstart.py:{line} and consumed by step 1" in error
    assert report.startswith("1 of 1 donors donated, 4.0 MiB (100.0% of the bytes offered)")


@pytest.mark.parametrize("name", ["quickstart.py", "jax_quickstart.py"])
def test_the_quickstarts_print_no_addresses_and_no_absolute_paths(name: str) -> None:
    output = run_example(name, timeout=120).stdout
    assert str(EXAMPLES.parent) not in output
    assert not re.search(r"0x[0-9a-f]+|(?<![\w.])/\w+/", output)


def test_the_examples_of_jaxs_page_do_what_its_page_says() -> None:
    output = run_example("jax_quickstart.py", timeout=120).stdout
    parts = dict(part.split("\n", maxsplit=1) for part in output.removeprefix("-- ").split("\n-- "))
    assert parts["the result takes y's memory"].split("\n") == [
        "  x donated: False, y donated: True",
        "  z in y's memory: True",
    ]
    assert parts["arguments given by keyword are donated, too"] == "  params donated: True, state donated: True"
    assert parts["of a pytree, every array"].split("\n") == [
        "  donated: [True, True]",
        "  named: xs[0] (argument 0 of add_ones), xs[1] (argument 0 of add_ones)",
    ]
    error = parts["a donated array cannot be used again"]
    assert error.startswith("  DonatedBufferError: f32[2,3] tensor 'y (argument 1 of add)' has no buffer any more")
    more, other = parts["more donors than outputs"], parts["a donor of another shape than the output"]
    unusable = (
        r"  DonationWarning: Some donated buffers were not usable: {} \(donated at jax_quickstart.py:\d+, step \d\)"
    )
    assert re.match(unusable.format(r"f32\[2,3\]"), more)
    assert "more donors than outputs of its size: 2 donors and 1 output of 24 bytes." in more
    assert more.endswith("  donated: 1 of 2")
    assert re.match(unusable.format(r"f32\[1,3\]"), other)
    assert other.endswith("  y donated: False, and still [[1.0, 1.0, 1.0]]")
    assert parts["a training loop"].rstrip("\n").split("\n") == ["  the same memory: True", "  weight[0, 0]: 6.0"]


class Training:
    """One run of train_digits.py: its output, its folder, and its numbers by mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        arguments = ("--steps", str(STEPS), "--hidden", str(HIDDEN), "--out", str(folder))
        self.output = run_example("train_digits.py", *arguments, timeout=450).stdout
        numbers = json.loads((folder / "train_digits.json").read_text(encoding="utf-8"))
        self.runs: dict[str, dict[str, Any]] = {run["mode"]: run for run in numbers}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("digits"))


DONATING = ["donate", "auto"]


@pytest.mark.parametrize("mode", DONATING)
def test_training_computes_the_same_bits_with_and_without_donation(training: Training, mode: str) -> None:
    plain, donating = training.runs["plain"], training.runs[mode]
    assert len(plain["losses"]) == STEPS
    assert plain["losses"] == donating["losses"]
    assert plain["digest"] == donating["digest"]
    assert plain["accuracy"] == donating["accuracy"]
    assert training.output.count(f"of 'plain' and '{mode}': identical bit for bit") == 2


def test_training_learns(training: Training) -> None:
    assert training.runs["donate"]["accuracy"] > 0.5


@pytest.mark.parametrize("mode", DONATING)
def test_every_tensor_of_the_state_is_aliased_when_donated_and_none_when_not(training: Training, mode: str) -> None:
    plain, donating = training.runs["plain"], training.runs[mode]
    assert (plain["donors"], plain["aliases"], plain["aliased_bytes"]) == (0, 0, 0)
    assert donating["donors"] == donating["aliases"] == donating["state_tensors"] == 18
    assert donating["aliased_bytes"] == donating["donated_bytes"] == donating["state_bytes"]


@pytest.mark.parametrize("mode", DONATING)
def test_every_buffer_keeps_its_pointer_at_every_step_when_donated(training: Training, mode: str) -> None:
    assert training.runs[mode]["kept_pointers"] == [18] * STEPS


@pytest.mark.parametrize("mode", DONATING)
@pytest.mark.parametrize("measure", ["planned_bytes", "peak_bytes"])
def test_donation_saves_at_least_half_of_the_donated_bytes(training: Training, measure: str, mode: str) -> None:
    plain, donating = training.runs["plain"], training.runs[mode]
    assert plain[measure] - donating[measure] >= donating["donated_bytes"] / 2


def test_the_loop_of_the_automatic_run_has_no_line_of_donation() -> None:
    source = (EXAMPLES / "train_digits.py").read_text(encoding="utf-8")
    before, _, loop = source.partition("def train(")[2].partition("for step in range(")
    assert 'if mode == "auto":\n        auto_donate()' in before
    assert "donat" not in loop.partition("report = ")[0]
    # What it does with the old state is what the plain run does.
    plain, auto = re.findall(r'"(?:plain|auto)": (lambda state, updated: [^,]+),', source)
    assert plain == auto == "lambda state, updated: None"


def test_training_says_what_was_donated_and_where_the_picture_is(training: Training) -> None:
    assert training.output.count("18 of 18 donors donated") == 2
    assert training.output.count("│ (auto) │") == 18
    assert f"memory over the steps: {training.folder / 'train_digits.png'}" in training.output
    assert "plain step  1/6  loss" in training.output


def test_the_picture_of_the_training_is_a_png(training: Training) -> None:
    data = (training.folder / "train_digits.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1300, 702)


def test_training_exits_with_1_when_the_values_differ(tmp_path: Path) -> None:
    # GIVEN the example, changed so that the donating run draws other batches
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        if path.name == "train_digits.py":
            assert source.count("manual_seed(1)") == 1
            source = source.replace("manual_seed(1)", "manual_seed(len(mode))")
        (tmp_path / path.name).write_text(source, encoding="utf-8")
    # WHEN it runs
    arguments = ("--steps", "3", "--hidden", "16", "--out", str(tmp_path / "out"))
    output = run_script(RUN, str(tmp_path / "train_digits.py"), *arguments, timeout=300, exit_code=1).stdout
    # THEN it says so
    assert "NOT identical" in output


def test_training_refuses_too_few_steps() -> None:
    refused = run_example("train_digits.py", "--steps", "2", timeout=60, exit_code=2)
    assert "--steps is 2" in refused.stderr
