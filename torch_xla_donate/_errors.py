"""The exceptions and the warning, and the texts that more than one place needs."""

from __future__ import annotations

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


def see(page: str) -> str:
    """The end of a message: the command that shows a page of docs/, which a wheel carries."""
    return f"See `python -m torch_xla_donate explain {page}`."


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
        f"out. {see('debug_nans')}"
    )
