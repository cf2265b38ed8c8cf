"""Restores state after an interrupt. Python may raise KeyboardInterrupt between any two calls, also while a context is
entered or left."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _python_dispatch

from torch_xla_donate import _C

T = TypeVar("T")


_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
# What `Restored` restores: attributes of a module, or of an object that belongs to the thread. torch 2.8 has two flags.
_restored: list[tuple[Any, str]] = [(_python_dispatch, flag) for flag in _FLAGS if hasattr(_python_dispatch, flag)]


class Restored(_C.Scope):
    """Restores this thread's torch modes and the package's flags after an exception.

    The contexts inside also restore them, unless the interrupt hits while they do.
    """

    def enter(self) -> None:
        self._before = [(holder, name, getattr(holder, name)) for holder, name in _restored]
        self._gradients = torch.is_grad_enabled()
        self._backward_threads = torch._C._is_multithreading_enabled()
        self._depths = torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()

    def leave(self, raised: bool) -> None:
        if not raised or not hasattr(self, "_depths"):
            return
        functions, dispatches = self._depths
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > dispatches:
            torch._C._pop_torch_dispatch_stack(None)
        for holder, name, value in self._before:
            setattr(holder, name, value)
        torch._C._set_grad_enabled(self._gradients)
        torch._C._set_multithreading_enabled(self._backward_threads)
        _C.disarm_run()


class Switched(_C.Scope, Generic[T]):
    """A switch has another value inside the context, which holds the lock.

    Not a generator: the garbage collector would close one that an interrupt leaves suspended, and restore the value at
    any later time.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object], value: T, lock: Any = None) -> None:
        super().__init__(lock)
        self._read, self._write, self._value = read, write, value
        self._original: list[T] = []

    def enter(self) -> None:
        self._original.append(self._read())
        self._write(self._value)

    def leave(self, raised: bool) -> None:
        for original in self._original:
            self._write(original)


class PerThread(threading.local, Generic[T]):
    """A value of each thread, which begins as a copy of the given one."""

    def __init__(self, value: T) -> None:
        self.value = copy.copy(value)

    def replaced(self, value: T) -> Switched[T]:
        """A context in which this thread has another value."""
        return Switched(lambda: self.value, functools.partial(setattr, self, "value"), value)


def per_thread(value: T) -> PerThread[T]:
    """A value of each thread that `Restored` restores."""
    made = PerThread(value)
    _restored.append((made, "value"))
    return made
