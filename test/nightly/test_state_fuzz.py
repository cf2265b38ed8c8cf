"""Programs that call a function of a state several times compute the same in each way of donating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1]
FOUR_DEVICES = {"CPU_NUM_DEVICES": "4", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{FOLDER}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_state_has_the_same_values():
    done = python("-m", "fuzz.run", "--kind", "states", "--programs", "260", "--seed", "1")
    assert done.returncode == 0, done.stderr
    found = counts(done)
    assert found["programs"] == 260 and found["openxla"] == 20
    # Programs without donors, refused programs, and programs that stock torch_xla makes wrong say nothing.
    assert found["donated"] > 100 and found["refused"] < 13 and found.get("of_stock", 0) < 13


def test_a_state_has_the_same_values_on_four_devices():
    done = python("-m", "fuzz.run", "--kind", "states", "--programs", "78", "--seed", "2", "--sharded", **FOUR_DEVICES)
    assert done.returncode == 0, done.stderr
    found = counts(done)
    assert found["programs"] == 78 and found["donated"] > 20


# Marked programs that transpose seem to go wrong.
BROKEN = """
import sys
from fuzz import farm, run
true = farm.run

def broken(program, mode, sharded):
    outcome = true(program, mode, sharded)
    if mode == "marks" and ".t()" in farm.render(program, mode, sharded).source:
        return outcome._replace(wrong=["s0 is something else"])
    return outcome._replace(wrong=[])

farm.run = broken
run.main(["--kind", "states", "--programs", "40", "--seed", "3", "--mode", "auto", "--mode", "marks"])
"""


def test_what_is_wrong_is_shrunk_and_printed_as_a_program():
    done = python("-c", BROKEN)
    assert done.returncode == 1, done.stderr
    assert counts(done)["failures"] == 1
    heading, _, program = done.stderr.partition("\n\nimport torch\n")
    assert "of seed 3, marks:" in heading and "s0 is something else" in heading
    assert program.count(".t()") == 1 and "# call 0" in program and "# call 2" not in program
    compile(program, "shrunk", "exec")
