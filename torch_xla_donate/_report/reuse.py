"""Uses of tensors that a step would have consumed, had donation not been disabled."""

from __future__ import annotations

import threading
import warnings

from torch_xla_donate import _frames
from torch_xla_donate._errors import DonationWarning, describe_reuse
from torch_xla_donate._host import interrupts

_reported: set[tuple[str, str, int]] = set()


class _Local(threading.local):
    quiet = False


_local = _Local()
interrupts.restore(_local, "quiet")


def suppress_reuse_warnings() -> interrupts.Replaced:
    """What this package itself looks at on the user's behalf is not a use."""
    return interrupts.Replaced(_local, "quiet", True)


def report_reuse(name: str, array: str, where: str, step: int) -> None:
    """Warns of the use that is under way, once for each line that donates and each line that uses.

    The hooks call this from within the operation. What a filter makes of the warning is raised there.
    """
    if _local.quiet:
        return
    frame = _frames.user_frame()
    if frame is None:
        filename, _, line = where.rpartition(":")
        module, lineno = "<unknown>", int(line)
    else:
        filename, lineno = frame.f_code.co_filename, frame.f_lineno
        module = frame.f_globals.get("__name__", "<unknown>")
    key = (where, filename, lineno)
    if key in _reported:
        return
    warnings.warn_explicit(describe_reuse(name, array, where, step), DonationWarning, filename, lineno, module)
    # Not if it was raised: then each use is an error.
    _reported.add(key)
