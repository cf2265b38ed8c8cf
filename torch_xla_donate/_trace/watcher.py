"""Who watches the operations of a function that is traced to be replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from torch_xla_donate._host import interrupts


class Watcher(Protocol):
    """Looks at each operation of a function that is traced to be replayed."""

    def as_one(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a function that is one operation to the watcher: it reads its arguments and makes its result."""

    def uses(self, modules: Iterable[torch.nn.Module]) -> None:
        """Notes modules whose mode the trace depends on, though it calls copies of them."""

    def refuse(self, what: str, remedy: str) -> Exception:
        """The error for what a replay would not do again."""


class _Current(threading.local):
    watcher: Watcher | None = None


_current = _Current()
interrupts.restore(_current, "watcher")


def current_watcher() -> Watcher | None:
    """Who looks at the operations of this thread, if somebody does."""
    return _current.watcher


def watched(by: Watcher) -> interrupts.Replaced:
    """`by` looks at this thread's operations inside."""
    return interrupts.Replaced(_current, "watcher", by)


def as_one(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what traces the body of a loop: that is nobody's but the loop's."""
    by = current_watcher()
    return func(*args, **kwargs) if by is None else by.as_one(func, args, kwargs)
