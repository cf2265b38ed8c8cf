"""Checks of arguments that several functions have."""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any

import torch

from torch_xla_donate._errors import see


def check_count(argument: str, value: Any, remedy: str) -> None:
    """Raises TypeError or ValueError for what is not a whole number above 0. NumPy's ints are."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{argument} is of type {type(value).__name__}, not an int. {remedy}")
    if int(value) < 1:
        raise ValueError(f"{argument} is {value}. {remedy}")


def check_fraction(argument: str, value: Any) -> None:
    """Raises TypeError or ValueError for what is not a number above 0 and at most 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"{argument} is of type {type(value).__name__}, not a number. Pass a fraction such as 0.95. "
            f"{see('testing')}"
        )
    if not 0 < value <= 1:
        raise ValueError(f"{argument} is {value}. Pass a number above 0 and at most 1, such as 0.95. {see('testing')}")


def kind_of_lazy_body(f: Callable[..., Any]) -> str:
    """The kind of a function whose call returns before its body runs: ``a generator function``. Empty for others."""
    while isinstance(f, functools.partial | torch.nn.Module):
        f = f.func if isinstance(f, functools.partial) else f.forward
    if not inspect.isroutine(f):
        f = type(f).__call__
    kinds = {
        "a generator function": inspect.isgeneratorfunction,
        "an async def function": inspect.iscoroutinefunction,
        "an async generator function": inspect.isasyncgenfunction,
    }
    return next((kind for kind, is_kind in kinds.items() if is_kind(f)), "")
