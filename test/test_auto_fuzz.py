"""Random programs compute the same with automatic donation as without it; `make fuzz` runs many more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.programs import OPERATIONS, Machine

FOLDER = Path(__file__).parent


def fuzz(last: Path, *arguments: str, **environment: str) -> dict[str, int]:
    import os

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
    assert counts["of_stock"] + counts["of_history"] < 20 and counts["donated"] > 20


def test_random_programs_compute_the_same_on_four_devices(tmp_path):
    counts = fuzz(
        tmp_path / "last",
        *("--programs", "60", "--seed", "2", "--sharded"),
        CPU_NUM_DEVICES="4",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert counts["programs"] == 60
    assert counts["of_stock"] + counts["of_history"] < 10 and counts["donated"] > 5


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


def test_a_difference_is_found_and_shrunk(tmp_path):
    broken = """
import sys
import torch_xla_donate
from fuzz import run
true = run._run
def lie(program, device, sharded):
    result = true(program, device, sharded)
    if torch_xla_donate._C.auto_donates() and any(name == "update" for name, *_ in program):
        result["values"][0] = "something else"
    return result
run._run = lie
def replayed(program, sharded, automatic):
    with torch_xla_donate.auto_donate(automatic):
        return lie(program, "xla", sharded)
run.replayed = replayed
sys.argv = ["fuzz", "--programs", "40", "--seed", "3"]
run.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", broken], cwd=FOLDER, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 1
    assert "something else" in done.stderr and "'update'" in done.stderr
