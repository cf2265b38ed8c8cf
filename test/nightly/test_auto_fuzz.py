"""Random programs compute the same with automatic donation as without it; `make fuzz` runs many more."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
from children import Ended, in_process, run_file, run_in_child
from fuzz.programs import OPERATIONS, Machine

FOLDER = Path(__file__).resolve().parents[1]


def fuzz(*arguments: str) -> None:
    from fuzz import run

    # Replays run `python -m fuzz.run`.
    os.chdir(FOLDER)
    run.main(arguments, standalone_mode=False)


def counts_of(last: Path, *arguments: str, devices: int | None = None) -> dict[str, int]:
    try:
        done = run_in_child(fuzz, "--last", str(last), *arguments, devices=devices, timeout=900)
    except pytest.fail.Exception:
        print(f"last program {last.read_text() if last.exists() else None}")
        raise
    counts: dict[str, int] = json.loads(done.last_line)
    return counts


def test_random_programs_compute_the_same(tmp_path):
    counts = counts_of(tmp_path / "last", "--programs", "200", "--seed", "1")
    assert counts["programs"] == 200
    # A program says nothing if torch_xla itself differs from the CPU, or if nothing is donated.
    assert counts["of_stock"] < 8 and counts["of_history"] <= 1 and counts["donated"] > 20


def test_random_programs_compute_the_same_on_four_devices(tmp_path):
    counts = counts_of(tmp_path / "last", "--programs", "60", "--seed", "2", "--sharded", devices=4)
    assert counts["programs"] == 60
    assert counts["of_stock"] < 6 and counts["of_history"] <= 1 and counts["donated"] > 5


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


def broken(lie: str, programs: int, exit_code: int) -> Ended:
    path = FOLDER / "fuzz" / "broken.py"
    return run_file(path, lie, "--programs", str(programs), "--seed", "3", timeout=900, exit_code=exit_code)


def test_a_difference_is_found_and_shrunk():
    done = broken("update", 40, exit_code=1)
    assert "something else" in done.stderr and "'update'" in done.stderr


def test_a_difference_that_needs_an_earlier_program_is_found():
    done = broken("update_after_slice", 40, exit_code=1)
    *_, programs = done.stderr.splitlines()
    *earlier, last = ast.literal_eval(programs.partition("one after another: ")[2])
    assert "something else" in done.stderr and any(name == "update" for name, *_ in last)
    assert any(name == "assign_slice" for program in earlier for name, *_ in program)


def test_a_difference_in_no_fresh_process_is_shown_and_counted():
    done = broken("fifth_here", 6, exit_code=0)
    assert json.loads(done.last_line)["of_history"] == 1
    assert "no difference in fresh processes: [(" in done.stderr


@in_process
def test_a_program_that_stock_torch_xla_cannot_end_is_counted():
    """It harms no other: clones share a buffer until one is updated in place; torch_xla then destroys it for both."""
    from fuzz import run

    clones = [("data", 9, 0, 19), ("add_in_place", 5, 15, 15), ("parameter", 18, 4, 19), ("parameter", 6, 19, 5)]
    clones += [("step", 23, 5, 11), ("add", 8, 9, 17), ("parameter", 6, 19, 5), ("data", 6, 16, 13), ("row", 9, 0, 19)]
    for program in (clones, [("update", 0, 0, 0), ("step", 0, 0, 0)]):
        run.compare(program, False)
    assert (run.counts["programs"], run.counts["of_stock"], len(run.history)) == (2, 1, 1)
