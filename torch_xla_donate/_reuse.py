"""Uses of tensors that a step would have consumed, had donation not been disabled."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType

from torch_xla_donate import _interrupts
from torch_xla_donate._errors import DonationWarning, describe_reuse, is_internal

_told: set[tuple[str, str, int]] = set()


class _Local(threading.local):
    quiet = False


_local = _Local()
_interrupts.restore(_local, "quiet")


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """What this package itself looks at on the user's behalf is not a use."""
    before, _local.quiet = _local.quiet, True
    try:
        yield
    finally:
        _local.quiet = before


def report(name: str, array: str, where: str, step: int) -> None:
    """Warns of the use that is under way, once for each line that donates and each line that uses.

    The hooks call this from within the operation. What a filter makes of the warning is raised there.
    """
    if _local.quiet:
        return
    frame = _user_frame()
    if frame is None:
        filename, _, line = where.rpartition(":")
        module, lineno = "<unknown>", int(line)
    else:
        filename, lineno = frame.f_code.co_filename, frame.f_lineno
        module = frame.f_globals.get("__name__", "<unknown>")
    key = (where, filename, lineno)
    if key in _told:
        return
    warnings.warn_explicit(describe_reuse(name, array, where, step), DonationWarning, filename, lineno, module)
    # Not if it was raised: then each use is an error.
    _told.add(key)


def _user_frame() -> FrameType | None:
    """The innermost frame outside torch, torch_xla and this package; None if there is none to be found."""
    frame = _outside(sys._getframe(1))
    if frame is not None:
        return frame
    # Autograd runs the backward pass on threads without Python frames, while its caller waits.
    waiting = [frame for frame in sys._current_frames().values() if frame.f_code.co_name == "_engine_run_backward"]
    return _outside(waiting[0]) if len(waiting) == 1 else None


def _outside(frame: FrameType | None) -> FrameType | None:
    while frame is not None and is_internal(frame):
        frame = frame.f_back
    return frame
