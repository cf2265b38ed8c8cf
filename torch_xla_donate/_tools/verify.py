"""Runs a program in a child process that dumps and records its steps."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch_xla_donate import _config, hlo
from torch_xla_donate._errors import see
from torch_xla_donate._tools.collect import collect
from torch_xla_donate._tools.run import Program
from torch_xla_donate._tools.summary import RunSummary

_SMALLEST_MODULE = (
    "HloModule smallest, entry_computation_layout={(f32[8]{0})->f32[8]{0}}\n\n"
    "ENTRY main {\n  ROOT p = f32[8]{0} parameter(0)\n}\n"
)


def verify(
    program: Program,
    *,
    keep: Path | None = None,
    topology: str = "",
    undonated: bool = False,
    keeps_stdout: bool = False,
) -> RunSummary:
    """Runs a program in a child process, and summarises its steps when it has ended.

    SIGTERM and SIGHUP are passed to the program, so that the summary shows the steps until then. The program gets
    SIGINT from the terminal, or from another program that sends it to the process group, as `timeout` does.

    Args:
        program: the program.
        keep: a folder for the dump and the records; None for a temporary one.
        topology, undonated: as for `collect`.
        keeps_stdout: whether the program's standard output goes to standard error.

    Raises:
        FileExistsError: `keep` is not empty.
        ImportError, ValueError: as for `hlo.compile_for`.
    """
    if _config.IS_OFF:
        raise ValueError(
            f"TORCH_XLA_DONATE=0 switches torch_xla_donate off, so no step has donors. Unset it to verify a program. "
            f"{see('switched_off')}"
        )
    for name in filter(None, (topology, "cpu" if undonated else "")):
        hlo.compile_for(_SMALLEST_MODULE, name)  # raises an error before a long program runs for nothing
    with _folder(keep) as folder:
        options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # such as ``-W error``
        command = [sys.executable, *options, "-m", "torch_xla_donate", "run", "--record", str(folder)]
        exit_code = _run([*command, *program.arguments()], sys.stderr.fileno() if keeps_stdout else None)
        summary = collect(folder, str(program), topology=topology, undonated=undonated, exit_code=exit_code)
    if keep is None:
        summary = dataclasses.replace(
            summary, steps=tuple(dataclasses.replace(step, file="") for step in summary.steps)
        )
    return summary


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="torch_xla_donate_") as name:
            yield Path(name)
        return
    keep.mkdir(parents=True, exist_ok=True)
    if any(keep.iterdir()):
        raise FileExistsError(
            f"folder {keep} is not empty. Name a new folder, because XLA would number its modules from 0 again. "
            f"{see('verify')}"
        )
    yield keep.resolve()


def _run(command: list[str], stdout: int | None) -> int:
    """Runs a child process to its end, and passes signals to it.

    Signals that this process ignores, as under `nohup`, stay ignored in both.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # came before the child could get them
    before: dict[signal.Signals, Any] = {}

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            return  # the process group gets it
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, pass_on)
        child = subprocess.Popen(command, stdout=stdout)
        for missed in early:
            child.send_signal(missed)
        return child.wait()
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)
