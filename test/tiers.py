"""The tiers: what a test costs and guards, derived from its folder and from what its code calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

#: The marks, in the order of their costs. A test has one of them.
TIERS = {
    "unit": "logic in Python; hardly a step",
    "step": "runs steps in pytest's process",
    "process": "needs a separate process: a forked child, or an interpreter",
    "nightly": "long: only `make test-all` runs it",
}
# A test whose code reaches one of them has processes, in whichever folder it is.
_STARTERS = {"run_script", "run_in_child", "run_file", "subprocess"}


def tier(item: pytest.Item) -> str:
    """The tier of a test."""
    folder = next((part for part in item.path.parts[::-1] if part in TIERS), "step")
    return "process" if folder in ("unit", "step") and starts_process(item) else folder


def starts_process(item: pytest.Item) -> bool:
    """True for a test that reaches a starter: by its own code, its fixtures, or the functions of its module."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    functions = [item.function, *(definition.func for found in definitions for definition in found)]  # type: ignore[attr-defined]
    seen: set[int] = set()
    return any(_reaches(inspect.unwrap(f) if not hasattr(f, "__in_process__") else None, seen) for f in functions)


def _reaches(function: Any, seen: set[int]) -> bool:
    if function is None:
        return True
    if not isinstance(function, FunctionType) or id(function) in seen:
        return False
    seen.add(id(function))
    for name in _names(function.__code__):
        found = function.__globals__.get(name)
        if name in _STARTERS and found is not None:
            return True
        if isinstance(found, FunctionType) and found.__module__ == function.__module__ and _reaches(found, seen):
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
