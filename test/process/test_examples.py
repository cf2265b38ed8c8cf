"""The examples: each runs as a program in a forked child, and the tests check its claims."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch_xla
from children import Ended, run_file, run_in_child
from helpers import HAS_JAX, ROOT, console, needs_jax, run_in_a_fork

EXAMPLES = ROOT / "examples"
STEPS = 6
# The largest matrix has 41 MB, which malloc gives back to the system as soon as it is freed; the state has 125 MB.
HIDDEN = 3200


def run_example(name: str, *args: str, exit_code: int = 0) -> Ended:
    return run_file(EXAMPLES / name, *args, exit_code=exit_code)


def assert_no_addresses(output: str) -> None:
    """Nor full paths, so that each run prints the same."""
    assert str(EXAMPLES.parent) not in output
    assert not re.search(r"0x[0-9a-f]+|(?<![\w.])/\w+/", output)


def test_the_sharded_example_explains() -> None:
    """The report names the sharding of the donor that stays."""
    report = run_example("spmd.py").stdout
    assert "3 of 4 donors donated, 1.5 MiB (75.0% of the bytes offered)" in report
    assert report.splitlines()[:4] == [
        "step 1: ['momenta'] {replicated}: 512 of 512 KiB on each device, unusable",
        "step 1: ['weights'] {devices=[4,1]0,1,2,3}: 128 of 512 KiB on each device, donated",
        "step 2: ['momenta'] {devices=[4,1]0,1,2,3}: 128 of 512 KiB on each device, donated",
        "step 2: ['weights'] {devices=[4,1]0,1,2,3}: 128 of 512 KiB on each device, donated",
    ]
    told = " ".join(cells.split("│")[-2].strip() for cells in report.splitlines() if cells.count("│") > 5)
    assert "but not per device: the donor, sharded {replicated}, takes 524288 bytes on each device, and" in told


def test_the_examples_of_jaxs_page_do_what_its_page_says() -> None:
    output = run_example("jax_quickstart.py").stdout
    assert_no_addresses(output)
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
    assert error.startswith("  DonatedBufferError: f32[2,3] tensor 'y (argument 1 of add)' was donated at ")
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


@needs_jax
def test_a_jax_update_keeps_the_state_in_its_memory() -> None:
    output = run_example("user_computation.py").stdout
    first, kept, report = output.split("\n", maxsplit=2)
    before, after = (float(loss) for loss in re.fullmatch(r"loss ([\d.]+) -> ([\d.]+)", first).groups())
    assert after < before / 10
    assert kept == "parameters and velocities in their first memory: 20 of 20 steps"
    assert report.startswith("4 of 4 donors donated, 144 B (100.0% of the bytes offered)")
    assert report.count("donated, into kept") == 4
    assert "error: f32[8,2] tensor \"args[0]['weight'] of momentum\" was donated at " in report
    assert report.endswith("halved in the same memory: True\n")


def test_the_checkpoint_example_learns_saves_and_goes_on() -> None:
    """It shows the error of a save that comes too late."""
    output = run_example("checkpoint.py").stdout
    assert_no_addresses(output)
    *epochs, late, loaded = output.splitlines()
    losses = [float(line.rpartition(" ")[2]) for line in epochs]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert late.startswith("too late: f32[8,64] tensor \"state['weights']['hidden'] (argument 0 of train)\"")
    assert loaded == "first step after loading: 4 donors, 100% of their bytes reused"


def train_in_forks(script: str, *args: str, in_interpreter: str = "") -> None:
    """Runs an example that trains with and without donation: each run in a fork of this process.

    The example starts an interpreter for each run, which takes 7 s. The run of one mode may leave that as it is; what
    the TPU compiler makes of the steps is then left out.
    """
    sys.path.insert(0, os.path.dirname(script))
    import _show

    run_as_written = _show._run_one

    def run_one(command: Sequence[str], dump: Path, progress: object, task: object) -> int:
        if in_interpreter in command:
            return int(run_as_written(command, dump, progress, task))
        return run_in_a_fork(run_here, command, dump)

    _show._run_one = run_one
    if in_interpreter:
        _show.print_reuse = lambda console, steps: {mode: {} for mode in steps}
    sys.argv = [script, *args]
    warnings.resetwarnings()  # pytest's filters: a program shows a warning
    runpy.run_path(script, run_name="__main__")


def run_here(command: Sequence[str], dump: Path) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    torch_xla._setup_xla_flags()  # as torch_xla does when it is imported
    sys.argv = [*command[1:]]
    runpy.run_path(command[1], run_name="__main__")


def train(name: str, folder: Path, *sizes: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """Runs an example that trains with and without donation: its output, and its numbers by mode."""
    script = str(EXAMPLES / f"{name}.py")
    output = run_in_child(train_in_forks, script, *sizes, "--out", str(folder), exit_code=0).stdout
    return output, by_mode(folder / f"{name}.json")


def by_mode(path: Path) -> dict[str, dict[str, Any]]:
    return {run["mode"]: run for run in json.loads(path.read_text(encoding="utf-8"))}


def assert_picture(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_training_donates_its_whole_state_and_computes_the_same_bits(tmp_path: Path) -> None:
    output, runs = train("train_digits", tmp_path, "--steps", str(STEPS), "--hidden", str(HIDDEN))
    plain = runs["plain"]
    assert (plain["donors"], plain["aliases"], plain["aliased_bytes"]) == (0, 0, 0)
    assert len(plain["losses"]) == STEPS
    for mode in ("donate", "auto"):
        donating = runs[mode]
        # The values have the same bits
        for value in ("losses", "digest", "accuracy"):
            assert plain[value] == donating[value]
        assert donating["accuracy"] > 0.5
        assert output.count(f"of 'plain' and '{mode}': identical bit for bit") == 2
        # All of the state is aliased, if and only if it is donated, and keeps its place at every step
        assert donating["donors"] == donating["aliases"] == donating["state_tensors"] == 18
        assert donating["aliased_bytes"] == donating["donated_bytes"] == donating["state_bytes"]
        assert donating["kept_pointers"] == [18] * STEPS
        # It saves at least half of the donated bytes
        for measure in ("planned_bytes", "peak_bytes"):
            assert plain[measure] - donating[measure] >= donating["donated_bytes"] / 2, measure
    # It says what was donated and where the picture is
    assert output.count("18 of 18 donors donated") == 2
    assert output.count("│ (auto) │") == 18
    assert "plain step  1/6  loss" in output
    assert f"memory over the steps: {tmp_path / 'train_digits.png'}" in output
    assert_picture(tmp_path / "train_digits.png")


def test_training_exits_with_1_when_the_values_differ(tmp_path: Path) -> None:
    """Here a run has an interpreter, as the example starts it."""
    # GIVEN the examples, one changed so that the donating run draws other batches
    for path in EXAMPLES.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(source.replace("manual_seed(1)", "manual_seed(len(mode))"), encoding="utf-8")
    # WHEN it runs
    words = (str(tmp_path / "train_digits.py"), "--steps", "3", "--hidden", "16", "--out", str(tmp_path / "out"))
    output = run_in_child(train_in_forks, *words, kwargs={"in_interpreter": "auto"}, exit_code=1).stdout
    # THEN it says so
    assert "NOT identical" in output


# XLA writes out the products of smaller matrices, and takes longer to compile them.
TRANSFORMER = ("--steps", "5", "--accumulate", "2", "--layers", "2")


@pytest.mark.parametrize(
    ("name", "sizes", "tensors", "learns"),
    [("train_transformer", TRANSFORMER, 27, True), ("ema_and_gan", ("--steps", "4", "--hidden", "128"), 42, False)],
)
def test_a_donated_functional_state_is_aliased_as_a_whole(
    name: str, sizes: tuple[str, ...], tensors: int, learns: bool, tmp_path: Path
) -> None:
    """Every tensor of it; and the values have the same bits with and without donation."""
    output, runs = train(name, tmp_path, *sizes)
    plain, donate = runs["plain"], runs["donate"]
    # The HLO shows that torch_xla aliases nothing automatically, and the donation everything.
    assert (plain["donors"], plain["aliases"]) == (0, 0)
    assert donate["donors"] == donate["aliases"] == donate["state_tensors"] == tensors
    assert donate["aliased_bytes"] == donate["donated_bytes"] == donate["state_bytes"]
    # In memory: each tensor stays where it is. (In the first step torch_xla's cached constant 1 is an output, too, and
    # takes the memory of a bias of its size.)
    assert donate["kept_pointers"][1:] == [tensors] * (len(donate["losses"]) - 1)
    assert f"{tensors} of the new tensors are in their own old memory" in output
    # In the values: no difference.
    assert plain["losses"] == donate["losses"]
    assert plain["digest"] == donate["digest"]
    assert output.count("identical bit for bit") == 2
    # The report and the bytes per device show it.
    assert f"{tensors} of {tensors} donors donated" in output
    assert "memory of the step per device, as XLA planned it" in output
    assert donate["planned_bytes"] < plain["planned_bytes"]
    # The TPU compiler aliases as much.
    if plain["v6e"] is None:
        assert output.count("needs pip install") == 2
    else:
        assert plain["v6e"]["aliases"] == 0
        assert donate["v6e"]["aliases"] == tensors
        assert donate["v6e"]["aliased_bytes"] == donate["state_bytes"]
    assert_picture(tmp_path / f"{name}.png")
    if learns:  # how much depends on the text, which is that of this Python
        losses = [float.fromhex(loss) for loss in donate["losses"]]
        assert losses[0] - losses[-1] > 0.1


def test_sizes_that_do_not_fit_are_refused() -> None:
    for name, arguments, message in [
        ("train_digits.py", ("--steps", "2"), "--steps is 2"),
        ("train_transformer.py", ("--width", "30"), "--width is 30; it must be a multiple of 4"),
        ("kv_cache.py", ("--tokens", "9", "--context", "8"), "--tokens is 9; a cache of --context 8 has no room"),
    ]:
        refused = run_example(name, *arguments, exit_code=2)
        assert message in " ".join(refused.stderr.split())


def test_a_slice_written_cache_is_copied_whole_unless_donated(tmp_path: Path) -> None:
    """kv_cache.py with 3 positions of caches of 256."""
    sizes = ("--tokens", "3", "--sequences", "3", "--batch", "2", "--layers", "2", "--width", "64", "--context", "256")
    output = run_example("kv_cache.py", *sizes, "--out", str(tmp_path)).stdout
    modes = by_mode(tmp_path / "kv_cache.json")
    plain, donate, index_copy = each = [modes[mode] for mode in ("plain", "donate", "index_copy_")]
    whole = 2 * 2 * 2 * 256 * 64 * 4  # layers, keys and values, batch, context, width, bytes
    assert [mode["cache_bytes"] for mode in each] == [whole] * 3
    assert [mode["copied_bytes"] for mode in each] == [whole, 0, 0]
    assert [mode["aliased_caches"] for mode in each] == [0, 4, 4]
    assert plain["planned_bytes"] - donate["planned_bytes"] >= whole
    # A position that is a number is compiled for itself
    assert [mode["compilations"] for mode in each] == [3, 3, 1]
    # All ways decode the same tokens
    written = plain["written"]
    assert [len(sequence) for sequence in written] == [3, 3, 3]
    assert len({token for sequence in written for step in sequence for token in step}) > 2
    assert donate["written"] == index_copy["written"] == written
    assert "tokens of all modes: the same" in output
    # The TPU compiler aliases the same caches
    if HAS_JAX:  # and libtpu
        assert [mode["v6e"]["aliases"] for mode in each] == [0, 4, 4]


@needs_jax
def test_the_loops_reuse_on_a_tpu_what_the_page_shows(tmp_path: Path) -> None:
    output = run_example("loops.py", "--out", str(tmp_path)).stdout
    assert console("python examples/loops.py", output) in (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")


def test_the_slice_written_cache_of_a_llama_is_donated(tmp_path: Path) -> None:
    """The smallest size; test/nightly/test_llamas.py runs all programs."""
    program = "decoding, slice assignment"
    arguments = ("--program", program, "--layers", "1", "--width", "8", "--context", "8", "--steps", "3")
    output = run_example("huggingface.py", *arguments, "--out", str(tmp_path)).stdout
    cells = next(line for line in output.splitlines() if program in line).split("│")[2:-1]
    whole = 2 * 2 * 2 * 8 * 2 * 4 + 2 * 8  # keys and values, batch, heads, context, width of a head, bytes; the tokens
    reused = [0, 0, whole, whole, whole, whole]
    if not HAS_JAX:  # nor libtpu
        reused = [0, whole, whole]
    assert [int(cell.replace(",", "")) for cell in cells if "pip" not in cell] == [whole, *reused]
    assert "losses and tokens of the three ways: identical bit for bit" in output
