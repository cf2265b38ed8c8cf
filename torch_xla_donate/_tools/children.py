"""Child processes of a program: `multiprocessing`, and so `torch_xla.launch`, starts them with this package loaded."""

from __future__ import annotations

import multiprocessing.spawn
import os
from multiprocessing import util
from pathlib import Path
from typing import Any

from torch_xla_donate._tools import record


class _Startup:
    """Unpickled first of all in a child process, before the program's main module is imported."""

    def __reduce__(self) -> Any:
        return _start, (record.recorded_root(),)


def _start(root: Path | None) -> None:
    """Begins a child process. Its import of this package has read `TORCH_XLA_DONATE_AUTO`."""
    record.start(root)
    prepare()


def prepare() -> None:
    """Starts child processes of `multiprocessing` with this package, and with a record if this process has one."""
    prepare_data = multiprocessing.spawn.get_preparation_data

    def with_startup(name: str) -> dict[str, Any]:
        return {"torch_xla_donate": _Startup(), **prepare_data(name)}

    multiprocessing.spawn.get_preparation_data = with_startup  # type: ignore[assignment]
    os.register_at_fork(after_in_child=lambda: record.start(record.recorded_root()))
    # A process of multiprocessing ends without atexit, and forgets finalizers when it begins. It refers
    # weakly to the first argument, so that is an object that stays.
    util.register_after_fork(prepare, lambda _: util.Finalize(None, record.record_runs, exitpriority=0))
