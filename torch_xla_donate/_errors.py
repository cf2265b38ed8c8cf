"""The exceptions, the warning, and the texts that several modules use."""

from __future__ import annotations

import warnings
from typing import Any


class DonationError(RuntimeError):
    """A donation was refused or, with ``strict``, was unusable.

    Attributes:
        result: the results of a function made by `compile`, if the error came after the function had run. A strict
            donation so does not lose results for which the step consumed other arguments. Else None.
    """

    result: Any = None


class DonatedBufferError(DonationError):
    """A tensor was used after a step had consumed its buffer."""


class DonationWarning(UserWarning):
    """A donation was unusable or has a side effect, such as a use that fails when donation is enabled.

    Also: a setting that switches donation off.
    """


SWITCHED_OFF = "TORCH_XLA_DONATE=0 switches torch_xla_donate off: nothing is hooked, and nothing is donated."


def warn(message: str, where: str) -> None:
    """Warns at ``file:line`` of the donation, since that is the line to change."""
    filename, _, line = where.rpartition(":")
    warnings.warn_explicit(message, DonationWarning, filename, int(line))


def see(page: str) -> str:
    """The end of a message: the command that shows a page of docs/."""
    return f"See `python -m torch_xla_donate explain {page}`."


def _tensor(name: str, array: str) -> str:
    return f"{array} tensor{f' {name!r}' if name else ''}"


def describe_use(name: str, array: str, where: str, step: int) -> str:
    """The text of a DonatedBufferError."""
    return (
        f"{_tensor(name, array)} was donated at {where} and step {step} reused its memory. "
        "Use the step's result, or .clone() it before the step. t.copy_(new) makes it usable again. "
        f"{see('use_after_donation')}"
    )


def describe_reuse(name: str, array: str, where: str, step: int) -> str:
    """The text of the warning for the same use while donation is disabled."""
    return (
        f"{_tensor(name, array)} is used after it was donated at {where}. "
        f"With donation enabled, step {step} reuses its memory and this line raises DonatedBufferError. "
        f"Use the step's result, or .clone() it before the step. {see('debug_nans')}"
    )
