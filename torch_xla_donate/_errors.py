"""The exceptions and the warning, and the texts that more than one place needs."""

from __future__ import annotations

import contextlib
import traceback
import types
import warnings
from typing import Any


class DonationError(RuntimeError):
    """A donation was refused, or, with ``strict``, could not be used.

    Attributes:
        result: what a function made by `compile` has returned, if the error was found after it had run; so that a
            strict donation does not lose the results for which other arguments were consumed. Else None.
    """

    result: Any = None


class DonatedBufferError(DonationError):
    """A tensor was used after a step had consumed its buffer."""


class DonationWarning(UserWarning):
    """A donation that XLA could not use, a setting that switches donation off, a use that donation would forbid, or a
    function of `compile` with ever more signatures."""


def warn(message: str, where: str) -> None:
    """A DonationWarning at the place of a donation, ``file:line``: that is where something can be done about it."""
    filename, _, line = where.rpartition(":")
    warnings.warn_explicit(message, DonationWarning, filename, int(line))


def _tensor(name: str, array: str) -> str:
    return f"{array} tensor{f' {name!r}' if name else ''}"


def describe_use(name: str, array: str, where: str, step: int) -> str:
    """The text of a DonatedBufferError: what was touched, who gave it away, and what to do."""
    return (
        f"{_tensor(name, array)} has no buffer any more: it was donated at {where} and consumed by step {step}, "
        "whose output now lives in that memory. Use the step's result instead; to keep the old "
        "value, call .clone() before the step, or take the donation out. Shape and dtype are "
        "still readable, and copying a new value in as a whole (t.copy_(new)) makes the tensor "
        "usable again."
    )


def describe_reuse(name: str, array: str, where: str, step: int) -> str:
    """The text of a warning: the same, where donation was disabled and nothing is lost."""
    return (
        f"{_tensor(name, array)} is used although it was donated at {where}: step {step} would have consumed it, had "
        "donation not been disabled. Its value is still right; with donation on, this line raises DonatedBufferError. "
        "Use the step's result instead; to keep the old value, call .clone() before the step, or take the donation "
        "out. "
        "See docs/debug_nans.md."
    )


def is_internal(frame: types.FrameType) -> bool:
    """Whether a frame is not the user's: of this package, torch, torch_xla, or what stands between them."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    generated = frame.f_code.co_filename.startswith("<eval_with_key>")  # torch.fx
    return generated or package in (
        "torch",
        "torch_xla",
        "torch_xla_donate",
        "contextlib",
        "functools",
        "typing_extensions",
    )


def line_of(error: BaseException) -> str:
    """``file:line`` of the innermost frame of the user's code that an error has passed."""
    found = "unknown line"
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not is_internal(frame):
            found = f"{frame.f_code.co_filename}:{line}"
    return found


def forget_values(error: BaseException) -> None:
    """Drops what the frames that an error has passed hold, but for those of the user's code.

    Where torch_xla fails in a trace, they hold placeholders, and a sync ends the process if these are alive.
    """
    found: BaseException | None = error
    while found is not None:
        for frame, _ in traceback.walk_tb(found.__traceback__):
            if is_internal(frame):
                with contextlib.suppress(RuntimeError):  # it is running
                    frame.clear()
        found = found.__context__
