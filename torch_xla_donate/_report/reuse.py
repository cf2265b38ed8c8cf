"""Warns of uses of tensors that a step would have consumed with donation enabled."""

from __future__ import annotations

import warnings

from torch_xla_donate import _frames
from torch_xla_donate._errors import DonationWarning, describe_reuse

_reported: set[tuple[str, str, int]] = set()


def report_reuse(name: str, array: str, where: str, step: int) -> None:
    """Warns of the running use, once for each pair of a donating and a using line.

    The hooks call this inside the operation. If a filter turns the warning into an error, the operation raises it.
    """
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
    # Not reached if the warning is an error, so each use raises.
    _reported.add(key)
