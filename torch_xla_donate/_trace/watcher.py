"""The watcher of a function that is traced for a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from torch_xla_donate._host import interrupts


class Watcher(Protocol):
    """Watches each operation of a function that is traced for a replay."""

    def as_one(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function that counts as one operation, which reads the arguments and makes the result."""

    def uses(self, modules: Iterable[torch.nn.Module]) -> None:
        """Notes modules whose mode affects the trace, although it calls copies of them."""

    def refuse(self, what: str, remedy: str) -> Exception:
        """The error for an action that a replay would not repeat."""


_watcher: interrupts.PerThread[Watcher | None] = interrupts.per_thread(None)


def current_watcher() -> Watcher | None:
    """The watcher of this thread's operations, if there is one."""
    return _watcher.value


def watched(by: Watcher) -> interrupts.Replaced:
    """A context in which `by` watches this thread's operations."""
    return _watcher.replaced(by)


def as_one(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function that traces the body of a loop. The watcher sees it as one operation."""
    by = current_watcher()
    return func(*args, **kwargs) if by is None else by.as_one(func, args, kwargs)
