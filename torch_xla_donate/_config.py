"""Settings: what the environment says, to us and to torch_xla."""

from __future__ import annotations

import os
import re

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


def flag(name: str) -> bool:
    """The environment variable as a yes or no. ValueError if it is neither."""
    value = os.environ.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(f"{name}={os.environ[name]!r} is neither yes nor no. Set it to 1 or 0.")


def strict_by_default() -> bool:
    """Whether unusable donations raise where a call does not say (``TORCH_XLA_DONATE_STRICT``)."""
    return flag("TORCH_XLA_DONATE_STRICT")


def check_strict(strict: bool | None) -> None:
    """TypeError if the argument ``strict`` of a donation is neither yes, no nor left open."""
    if strict is not None and not isinstance(strict, bool):
        raise TypeError(
            f"strict is {strict!r}, of type {type(strict).__name__}, not a bool. Pass True or False, or omit it to "
            "use TORCH_XLA_DONATE_STRICT. Nothing was donated."
        )


def debug_nans() -> bool:
    """Whether every step is checked for NaN, and nothing donated (``TORCH_XLA_DONATE_DEBUG_NANS``)."""
    return flag("TORCH_XLA_DONATE_DEBUG_NANS")


def warn_of_copies() -> bool:
    """Whether to warn of donated buffers that XLA copies all the same (``TORCH_XLA_DONATE_WARN_COPIES``)."""
    return flag("TORCH_XLA_DONATE_WARN_COPIES")


def auto_donate() -> bool:
    """Whether steps donate by liveness from the start (``TORCH_XLA_DONATE_AUTO``)."""
    return flag("TORCH_XLA_DONATE_AUTO")


def functionalization_off() -> bool:
    """Whether ``XLA_DISABLE_FUNCTIONALIZATION`` is on, so that views share graphs instead of being worked out anew."""
    return is_yes(os.environ.get("XLA_DISABLE_FUNCTIONALIZATION", "0"))


def is_yes(value: str) -> bool:
    """A yes or no as torch_xla reads it (2.9.0: a word, else C's atoi)."""
    number = re.match(r"\s*[+-]?\d+", value)
    return value == "true" or (number is not None and int(number.group()) != 0)


def world_size() -> int:
    """How many processes a launcher has started (torchrun's ``WORLD_SIZE``); 1 if none has."""
    number = os.environ.get("WORLD_SIZE", "")
    return int(number) if number.isdecimal() else 1
