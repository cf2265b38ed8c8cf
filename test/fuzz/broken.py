"""The fuzzer with a defect: automatic donation seems to change a value. `broken.py LIE ...`, then fuzz.run's options.

Replays run this file in fresh interpreters, so the defect is there, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch_xla_donate
from fuzz import run
from fuzz.programs import Program

# Whether a value changes. They get the names of the program's operations, and whether an earlier program of the process
# has had a slice assignment while donation was automatic.
LIES: dict[str, Callable[[set[str], bool], bool]] = {
    "update": lambda names, before: "update" in names,
    "update_after_slice": lambda names, before: before and "update" in names,
    "fifth_here": lambda names, before: "--replay" not in sys.argv and len(run.history) == 5,
}
# A process for each attempt to shrink a program takes long.
IN_THIS_PROCESS = {"update"}

name = sys.argv.pop(1)
true_run, written = run._run, False


def broken_run(program: Program, device: str, sharded: bool) -> dict[str, Any]:
    global written
    result, before = true_run(program, device, sharded), written
    if torch_xla_donate._C.auto_donates():
        names = {operation for operation, *_ in program}
        written = written or "assign_slice" in names
        if LIES[name](names, before):
            result["values"][0] = "something else"
    return result


def replayed_here(programs: list[Program], sharded: bool, automatic: bool) -> dict[str, Any]:
    with torch_xla_donate.auto_donate(automatic):
        return broken_run(programs[-1], "xla", sharded)


run._run = broken_run
run.COMMAND = [sys.executable, __file__, name]
if name in IN_THIS_PROCESS:
    run.replayed = replayed_here  # type: ignore[assignment]
if __name__ == "__main__":
    run.main()
