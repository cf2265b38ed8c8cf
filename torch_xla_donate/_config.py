"""Settings in the environment, for this package and for torch_xla."""

from __future__ import annotations

import enum
import os
import re
from typing import Literal

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def flag(name: str) -> bool:
    """The environment variable as a bool. Raises ValueError if it is neither yes nor no."""
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={os.environ[name]!r} is neither yes nor no. Set it to 1 or 0.")


def _is_off() -> bool:
    """Whether ``TORCH_XLA_DONATE=0`` switches the package off. Raises ValueError for another value than 0 or 1."""
    value = os.environ.get("TORCH_XLA_DONATE", "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"TORCH_XLA_DONATE={value!r} is unknown. Set it to 0 to switch torch_xla_donate off, or to 1, or unset it."
        )
    return value == "0"


#: The same for the whole process, because the hooks are installed by the import or not at all.
IS_OFF = _is_off()


class Strictness(enum.IntEnum):
    """The effect of an unusable donation. The numbers are those of csrc/registry/donor.h."""

    OFF = 0
    WARN = 1
    ERROR = 2


Strict = bool | Literal["off", "warn", "error"] | None
STRICT = "TORCH_XLA_DONATE_STRICT"  # the value of `strict` where it is None
_MODES = {mode.name.lower(): mode for mode in Strictness}


def strictness(strict: Strict) -> Strictness:
    """The effect of an unusable donation. Without ``strict`` the environment decides (``TORCH_XLA_DONATE_STRICT``)."""
    if isinstance(strict, str):
        return _MODES[strict]
    if strict is not None:
        return Strictness.ERROR if strict else Strictness.WARN
    value = os.environ.get(STRICT, "").strip().lower()
    if value in _MODES:
        return _MODES[value]
    if value in _TRUE or value in _FALSE:
        return Strictness.ERROR if value in _TRUE else Strictness.WARN
    raise ValueError(
        f"{STRICT}={os.environ[STRICT]!r} is unknown. Set it to off, warn or error, or to 1 for error and 0 for warn."
    )


def check_strict(strict: Strict) -> None:
    """Raises TypeError or ValueError unless the argument ``strict`` of a donation is valid."""
    if strict is None or isinstance(strict, bool) or (isinstance(strict, str) and strict in _MODES):
        return
    kind = ValueError if isinstance(strict, str) else TypeError
    raise kind(
        f"strict is {strict!r}, of type {type(strict).__name__}, and unknown. Pass 'off', 'warn' or 'error', a bool, "
        "or omit it to use TORCH_XLA_DONATE_STRICT. Nothing was donated."
    )


def is_yes(value: str) -> bool:
    """Whether torch_xla reads the value as true (2.9.0: the word ``true``, or a number for C's atoi)."""
    number = re.match(r"\s*[+-]?\d+", value)
    return value == "true" or (number is not None and int(number.group()) != 0)
