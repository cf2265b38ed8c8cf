"""Settings in the environment, for this package and for torch_xla."""

from __future__ import annotations

import os
import re

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


def is_strict(strict: bool | None) -> bool:
    """Whether an unusable donation raises. Without ``strict`` the environment decides (``TORCH_XLA_DONATE_STRICT``)."""
    return flag("TORCH_XLA_DONATE_STRICT") if strict is None else strict


def check_strict(strict: bool | None) -> None:
    """Raises TypeError unless the argument ``strict`` of a donation is a bool or None."""
    if strict is not None and not isinstance(strict, bool):
        raise TypeError(
            f"strict is {strict!r}, of type {type(strict).__name__}, not a bool. Pass True or False, or omit it to "
            "use TORCH_XLA_DONATE_STRICT. Nothing was donated."
        )


def debug_nans() -> bool:
    """Whether steps donate nothing and check their outputs for NaN (``TORCH_XLA_DONATE_DEBUG_NANS``)."""
    return flag("TORCH_XLA_DONATE_DEBUG_NANS")


def functionalization_off() -> bool:
    """Whether ``XLA_DISABLE_FUNCTIONALIZATION`` is on. Views then share the graphs of their bases."""
    return is_yes(os.environ.get("XLA_DISABLE_FUNCTIONALIZATION", "0"))


def is_yes(value: str) -> bool:
    """Whether torch_xla reads the value as true (2.9.0: the word ``true``, or a number for C's atoi)."""
    number = re.match(r"\s*[+-]?\d+", value)
    return value == "true" or (number is not None and int(number.group()) != 0)


def world_size() -> int:
    """The number of processes that a launcher has started (torchrun's ``WORLD_SIZE``); 1 without a launcher."""
    number = os.environ.get("WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1
