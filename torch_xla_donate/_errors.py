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
        f"{_tensor(name, array)} was donated at {where} and step {step} reused its memory. "
        "Use the step's result, or .clone() it before the step. t.copy_(new) makes it usable again. "
        f"{see('use_after_donation')}"
    )


def describe_reuse(name: str, array: str, where: str, step: int) -> str:
    """The text of a warning: the same, where donation was disabled and nothing is lost."""
    return (
        f"{_tensor(name, array)} is used after it was donated at {where}. "
        f"With donation enabled, step {step} reuses its memory and this line raises DonatedBufferError. "
        f"Use the step's result, or .clone() it before the step. {see('debug_nans')}"
    )
