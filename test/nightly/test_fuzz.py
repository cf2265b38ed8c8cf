"""Random programs compute the same in each way of donating as without it; `make fuzz` runs many more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from children import in_process, run_in_child
from fuzz.programs import OPERATIONS, Machine


def fuzz(*arguments: str) -> None:
    from fuzz import run

    run.main(arguments)  # which ends with an exit code


def counts_of(last: Path, *arguments: str, devices: int | None = None) -> dict[str, int]:
    try:
        done = run_in_child(fuzz, "--last", str(last), *arguments, devices=devices, timeout=1200, exit_code=0)
    except pytest.fail.Exception:
        print(f"last program {last.read_text() if last.exists() else None}")
        raise
    counts: dict[str, int] = json.loads(done.last_line)
    return counts


@pytest.mark.parametrize(
    ("programs", "options", "devices", "of_stock", "donated"),
    [(200, ("--seed", "1"), None, 8, 20), (60, ("--seed", "2", "--sharded"), 4, 6, 5)],
    ids=["one device", "four devices"],
)
def test_random_programs_compute_the_same(tmp_path, programs, options, devices, of_stock, donated):
    counts = counts_of(tmp_path / "last", "--programs", str(programs), *options, devices=devices)
    assert counts["programs"] == programs
    # A program says nothing if torch_xla itself differs from the CPU, or if nothing is donated.
    assert counts["of_stock"] < of_stock and counts["donated"] > donated


def test_each_operation_means_something_on_the_cpu():
    def state(machine):
        return [t.tolist() for t in machine.tensors], len(machine.kept), len(machine.seen)

    for name in OPERATIONS:
        machine = Machine("cpu", lambda wait: None, {"mark": lambda machine, x, number: machine.put(x + 1, number)})
        for first in (1, 2, 4):
            machine.operation("upload", 2, 0, first)
        machine.operation("parameter", 0, 0, 1)
        machine.operation("loss", 3, 3, 1)
        if name == "gradient":
            machine.operation("backward", 0, 0, 0)
        before = state(machine)
        machine.operation(name, 0, 1, 5)
        assert state(machine) != before or name in ("step", "collect"), name


def fuzz_with_a_defect() -> None:
    """Automatic donation seems to change a value of each program with an update."""
    from fuzz import run

    import torch_xla_donate

    true_run = run._run

    def broken_run(program, device, sharded):
        result = true_run(program, device, sharded)
        if torch_xla_donate._C.auto_donates() and "update" in {name for name, *_ in program}:
            result["values"][0] = "something else"
        return result

    run._run = broken_run
    fuzz("--programs", "40", "--seed", "3")


def test_a_difference_is_found_and_shrunk():
    done = run_in_child(fuzz_with_a_defect, timeout=900, exit_code=1)
    assert "something else" in done.stderr
    assert "'update'" in done.stderr.partition("Falsifying example: check(")[2]


@in_process
def test_a_program_that_stock_torch_xla_cannot_end_is_counted():
    """It harms no other: clones share a buffer until one is updated in place; torch_xla then destroys it for both."""
    from fuzz import run

    clones = [("data", 9, 0, 19), ("add_in_place", 5, 15, 15), ("parameter", 18, 4, 19), ("parameter", 6, 19, 5)]
    clones += [("step", 23, 5, 11), ("add", 8, 9, 17), ("parameter", 6, 19, 5), ("data", 6, 16, 13), ("row", 9, 0, 19)]
    for program in (clones, [("update", 0, 0, 0), ("step", 0, 0, 0)]):
        run.compare(program, False)
    assert (run.counts["programs"], run.counts["of_stock"]) == (2, 1)


# --- Programs that call a function of a state several times ---

STATES = ("--kind", "states")


def test_a_state_has_the_same_values(tmp_path):
    counts = counts_of(tmp_path / "last", *STATES, "--programs", "260", "--seed", "1")
    assert counts["programs"] == 260 and counts["openxla"] > 0
    # Programs without donors, refused programs, and programs that stock torch_xla makes wrong say nothing.
    assert counts["donated"] > 1000 and counts["refused"] < 13 and counts["of_stock"] < 13


def test_a_state_has_the_same_values_on_four_devices(tmp_path):
    counts = counts_of(tmp_path / "last", *STATES, "--programs", "78", "--seed", "2", "--sharded", devices=4)
    assert counts["programs"] == 78 and counts["donated"] > 300


def fuzz_states_with_a_defect() -> None:
    """Marked programs that transpose seem to go wrong."""
    from fuzz import farm

    true_run = farm.run

    def broken_run(program, mode, sharded):
        outcome = true_run(program, mode, sharded)
        if mode == "marks" and ".t()" in farm.render(program, mode, sharded).source:
            return outcome._replace(wrong=["s0 is something else"])
        return outcome._replace(wrong=[])

    farm.run = broken_run
    fuzz(*STATES, "--programs", "300", "--seed", "3", "--mode", "auto", "--mode", "marks")


def test_what_is_wrong_is_shrunk_and_printed_as_a_program():
    done = run_in_child(fuzz_states_with_a_defect, timeout=1200, exit_code=1)
    heading, _, program = done.stderr.rpartition("AssertionError: marks\n")[2].partition("\n\nimport torch\n")
    assert heading == "s0 is something else"
    program = program.partition("\nFalsifying example")[0]
    assert program.count(".t()") == 1 and "# call 0" in program and "# call 2" not in program
    compile(program, "shrunk", "exec")
