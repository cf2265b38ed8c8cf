"""Random programs compute the same with automatic donation as without it; `make fuzz` runs many more."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.programs import OPERATIONS, Machine

FOLDER = Path(__file__).parent


def fuzz(last: Path, *arguments: str, **environment: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-m", "fuzz.run", "--last", str(last), *arguments],
        cwd=FOLDER,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"exit code {done.returncode}, last program {last.read_text()}\n{done.stdout}\n{done.stderr}")
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def test_random_programs_compute_the_same(tmp_path):
    counts = fuzz(tmp_path / "last", "--programs", "200", "--seed", "1")
    assert counts["programs"] == 200
    # Where torch_xla itself differs from the CPU nothing is said; where nothing is donated, either.
    assert counts["of_stock"] < 8 and counts["of_history"] <= 1 and counts["donated"] > 20


def test_random_programs_compute_the_same_on_four_devices(tmp_path):
    counts = fuzz(
        tmp_path / "last",
        *("--programs", "60", "--seed", "2", "--sharded"),
        CPU_NUM_DEVICES="4",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert counts["programs"] == 60
    assert counts["of_stock"] < 6 and counts["of_history"] <= 1 and counts["donated"] > 5


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_means_something_on_the_cpu(name):
    def state(machine):
        return [t.tolist() for t in machine.tensors], len(machine.kept), len(machine.seen)

    machine = Machine("cpu", lambda wait: None, {"mark": lambda machine, x, number: machine.put(x + 1, number)})
    machine.op_upload(2, 0, 1)
    machine.op_upload(2, 0, 2)
    machine.op_upload(2, 0, 4)
    machine.op_parameter(0, 0, 1)
    machine.op_loss(3, 3, 1)
    if name == "gradient":
        machine.op_backward(0, 0, 0)
    before = state(machine)
    getattr(machine, f"op_{name}")(0, 1, 5)
    assert state(machine) != before or name in ("step", "collect")


# Runs the fuzzer, in which automatic donation seems to change a value where lies() says so. It is told the program, and
# whether an earlier one of the process has had a slice assignment while donation was automatic.
BROKEN = """
import sys
import torch_xla_donate
from fuzz import run
true, written = run._run, False

def broken(program, device, sharded):
    global written
    result, before = true(program, device, sharded), written
    if torch_xla_donate._C.auto_donates():
        names = {{name for name, *_ in program}}
        written = written or "assign_slice" in names
        if ({lies}):
            result["values"][0] = "something else"
    return result

run._run = broken
run.COMMAND = [sys.executable, __file__]
{more}
run.main()
"""
# A process for each attempt to shrink a program takes long.
IN_THIS_PROCESS = """
def replayed(programs, sharded, automatic):
    with torch_xla_donate.auto_donate(automatic):
        return broken(programs[-1], "xla", sharded)
run.replayed = replayed
"""


def broken(folder: Path, lies: str, programs: int, more: str = "") -> subprocess.CompletedProcess[str]:
    script = folder / "broken.py"
    script.write_text(BROKEN.format(lies=lies, more=more))
    return subprocess.run(
        [sys.executable, str(script), "--programs", str(programs), "--seed", "3"],
        env={**os.environ, "PYTHONPATH": f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def test_a_difference_is_found_and_shrunk(tmp_path):
    done = broken(tmp_path, '"update" in names', 40, IN_THIS_PROCESS)
    assert done.returncode == 1
    assert "something else" in done.stderr and "'update'" in done.stderr


def test_a_difference_that_needs_an_earlier_program_is_found(tmp_path):
    done = broken(tmp_path, 'before and "update" in names', 40)
    assert done.returncode == 1, done.stdout + done.stderr
    *_, programs = done.stderr.splitlines()
    *earlier, last = ast.literal_eval(programs.partition("one after another: ")[2])
    assert "something else" in done.stderr and any(name == "update" for name, *_ in last)
    assert any(name == "assign_slice" for program in earlier for name, *_ in program)


def test_a_difference_that_is_in_no_fresh_process_is_told_and_counted(tmp_path):
    done = broken(tmp_path, '"--replay" not in sys.argv and len(run.history) == 5', 6)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["of_history"] == 1
    assert "no difference in fresh processes: [(" in done.stderr


def test_a_program_that_stock_torch_xla_cannot_end_is_counted_and_harms_no_other(tmp_path):
    # Clones share a buffer until one is updated in place; torch_xla then destroys it for the other.
    script = tmp_path / "clones.py"
    script.write_text("""
import json
from fuzz import run

clones = [("data", 9, 0, 19), ("add_in_place", 5, 15, 15), ("parameter", 18, 4, 19), ("parameter", 6, 19, 5),
          ("step", 23, 5, 11), ("add", 8, 9, 17), ("parameter", 6, 19, 5), ("data", 6, 16, 13), ("row", 9, 0, 19)]
for program in (clones, [("update", 0, 0, 0), ("step", 0, 0, 0)]):
    run.compare(program, False)
print(json.dumps([run.counts["programs"], run.counts["of_stock"], len(run.history)]))
""")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [2, 1, 1]
