"""A native debugger: it starts a program that donates, and breaks in a function that a hook calls."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DONATING_PROGRAM

# The breakpoint is set as soon as libtorch is there, before the import compares pointers.
COMMANDS = """
set pagination off
set auto-solib-add off
catch load libtorch_cpu
run
delete 1
sharedlibrary libtorch_cpu
break 'torch::lazy::LazyTensor::CurrentDataHandle() const'
continue
backtrace 2
delete
continue
"""


@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
def test_a_breakpoint_in_a_hooked_function_changes_nothing(tmp_path: Path) -> None:
    """It changes the function's code, and not the pointers to it."""
    program, commands = tmp_path / "program.py", tmp_path / "commands"
    program.write_text(DONATING_PROGRAM, encoding="utf-8")
    commands.write_text(COMMANDS, encoding="utf-8")
    command = ["gdb", "-nx", "-batch", "-x", str(commands), "--args", sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    frames = [line for line in done.stdout.splitlines() if line.startswith("#")]
    assert "CurrentDataHandle" in frames[0] and "/_C." in frames[1], done.stdout + done.stderr
    assert "\nDONATED\n" in done.stdout and "exited normally]" in done.stdout, done.stdout + done.stderr
