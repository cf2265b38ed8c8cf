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

from torch_xla_donate import hlo
from torch_xla_donate._errors import see
from torch_xla_donate._tools.collect import Progress, collect
from torch_xla_donate._tools.run import Program
from torch_xla_donate._tools.summary import RunSummary

_SMALLEST_MODULE = (
    "HloModule smallest, entry_computation_layout={(f32[8]{0})->f32[8]{0}}\n\n"
    "ENTRY main {\n  ROOT p = f32[8]{0} parameter(0)\n}\n"
)


def check_topology(topology: str) -> None:
    """Raises ImportError or ValueError as `hlo.compile_for` does, before a long program runs for nothing."""
    hlo.compile_for(_SMALLEST_MODULE, topology)


def verify(
    program: Program,
    *,
    keep: Path | None = None,
    topology: str = "",
    undonated: bool = False,
    keeps_stdout: bool = False,
    progress: Progress = lambda done, total: None,
) -> RunSummary:
    """Runs a program in a child process, and summarises its steps when it has ended.

    Signals that would end this process are passed to the program, so that the summary shows the steps until then.

    Args:
        program: the program.
        keep: a folder for the dump and the records; None for a temporary one.
        topology, undonated: as for `collect`.
        keeps_stdout: whether the program's standard output goes to standard error.
        progress: as for `collect`.

    Raises:
        FileExistsError: `keep` is not empty.
        ImportError, ValueError: as for `hlo.compile_for`.
    """
    for name in filter(None, (topology, "cpu" if undonated else "")):
        check_topology(name)
    with _folder(keep) as folder:
        command = [sys.executable, *_interpreter_options(), "-m", "torch_xla_donate", "run", "--record", str(folder)]
        with _pass_signals() as children:
            child = subprocess.Popen(
                [*command, *program.arguments()], stdout=sys.stderr.fileno() if keeps_stdout else None
            )
            children.append(child)
            exit_code = child.wait()
        summary = collect(
            folder, str(program), topology=topology, undonated=undonated, exit_code=exit_code, progress=progress
        )
    if keep is None:
        summary = dataclasses.replace(
            summary, steps=tuple(dataclasses.replace(step, file="") for step in summary.steps)
        )
    return summary


def _interpreter_options() -> list[str]:
    """Such as ``-W error``, as multiprocessing gives them to its children."""
    return list(subprocess._args_from_interpreter_flags())  # type: ignore[attr-defined]


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


@contextlib.contextmanager
def _pass_signals() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Passes signals to the child processes in the list. A terminal sends SIGINT to the child itself."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    handlers = {signal.SIGINT: lambda number, frame: None, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
