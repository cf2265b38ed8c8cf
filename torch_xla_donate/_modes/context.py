"""The base class of the modes, which are contexts of a thread, and the plainest of them."""

from __future__ import annotations

import contextlib
import functools
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

    Args:
        make: makes an object for each entry.
        on: switches the mode on with this object. An interrupt may keep it from running.
        off: switches the mode off. An interrupt may make it run twice.
    """

    def __init__(self, make: Callable[[], T], on: Callable[[T], object], off: Callable[[T], object]) -> None:
        super().__init__()
        self._make, self._on, self._off = make, on, off
        self._entries = interrupts.PerThread[list[T]]([])

    def last_entry(self) -> T:
        """The entry of this thread that is left next."""
        return self._entries.value[-1]

    def enter(self) -> None:
        self._entries.value.append(self._make())
        self._on(self.last_entry())

    def leave(self, raised: bool) -> None:
        # By the depth, because an interrupt may have come before the entry was made, or after it was switched off.
        while self._entries.value and len(self._entries.value) >= self.depth:
            self._off(self.last_entry())
            self._entries.value.pop()

    def __call__(self, func: F) -> F:
        if kind := kind_of_lazy_body(func):
            mode = type(self).__name__
            raise TypeError(
                f"{getattr(func, '__qualname__', func)} is {kind}, and a call of it returns before the body runs. Do "
                f"not decorate it, but write `with {mode}():` inside its body. {see('modes')}"
            )
        return super().__call__(func)


class SwitchMode(ThreadMode[_C.Mode]):
    """A mode of the hooks. switches: what it asks for, as `_C.Mode` takes it."""

    def __init__(self, **switches: bool) -> None:
        super().__init__(functools.partial(_C.Mode, **switches), _C.Mode.on, _C.Mode.off)


class donation_disabled(SwitchMode):
    """Steps of this thread inside the context donate nothing through this package.

    A mark ends at a step that reads it, as always. The report gives the reason, without a warning. torch_xla still
    reuses the memory of tensors that are updated in place.

    Args:
        report_reuse: whether a `DonationWarning` reports each use of a tensor that such a step would have consumed, at
            the line of the use, also after the context. The value is right, and stays. XLA would have consumed the
            donors whose bytes per device an output has, in the order of the graph's parameters. An inner context adds
            to the outer one.

    Raises:
        TypeError: as a decorator, if the function is a generator or ``async def`` function.
    """

    def __init__(self, *, report_reuse: bool = False) -> None:
        super().__init__(disabled=True, report_reuse=report_reuse)
