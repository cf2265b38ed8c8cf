"""The base class of the modes, which are contexts of a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch_xla_donate import _C
from torch_xla_donate._checks import kind_of_lazy_body
from torch_xla_donate._errors import see
from torch_xla_donate._host import interrupts

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class ThreadMode(_C.Scope, contextlib.ContextDecorator, Generic[T]):
    """A context and decorator that a thread may enter again while it is inside, and that several threads may enter.

    Subclasses make an object for each entry, and switch the mode on and off with it. An interrupt may keep `switch_on`
    from running, and make `switch_off` run twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entries = interrupts.PerThread[list[T]]([])

    def make_entry(self) -> T:
        raise NotImplementedError

    def switch_on(self, entry: T) -> None:
        raise NotImplementedError

    def switch_off(self, entry: T) -> None:
        raise NotImplementedError

    def last_entry(self) -> T:
        """The entry of this thread that is left next."""
        return self._entries.value[-1]

    def enter(self) -> None:
        self._entries.value.append(self.make_entry())
        self.switch_on(self.last_entry())

    def leave(self, raised: bool) -> None:
        # By the depth, because an interrupt may have come before the entry was made, or after it was switched off.
        while self._entries.value and len(self._entries.value) >= self.depth:
            self.switch_off(self.last_entry())
            self._entries.value.pop()

    def __call__(self, func: F) -> F:
        if kind := kind_of_lazy_body(func):
            mode = type(self).__name__
            raise TypeError(
                f"{getattr(func, '__qualname__', func)} is {kind}, and a call of it returns before the body runs. Do "
                f"not decorate it, but write `with {mode}():` inside its body. {see('modes')}"
            )
        return super().__call__(func)
