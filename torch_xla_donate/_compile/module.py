"""compile(module): a proxy that runs the module as one step and otherwise behaves like the module."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_xla_donate._errors import see

if TYPE_CHECKING:
    from torch_xla_donate._compile.base import Compiled
    from torch_xla_donate._compile.lower import Lowered


def _of_module(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method that calls the function with the module instead of the proxy."""
    return lambda self, *args: function(self._orig_mod, *args)


class ModuleProxy:
    """Runs calls as one step. Attributes, parameters and methods are the module's, also for ``isinstance``.

    A method that returns the module (``train()``, ``to()``) returns this object: ``m = m.eval()`` stays compiled.

    Args:
        compiled: the compiled module.
    """

    def __init__(self, compiled: Compiled) -> None:
        object.__setattr__(self, "_donate_compiled", compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._donate_compiled(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the module for these arguments, without running it: as for a function."""
        return self._donate_compiled.lower(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def _orig_mod(self) -> torch.nn.Module:
        """The module. torch.compile uses the same name."""
        return self._donate_compiled.__wrapped__  # type: ignore[no-any-return, attr-defined]

    __wrapped__ = _orig_mod

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._orig_mod)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._orig_mod, name)
        if not inspect.ismethod(value) or value.__self__ is not self._orig_mod:
            return value
        function = value.__func__

        @functools.wraps(function)
        def method(self: ModuleProxy, *args: Any, **kwargs: Any) -> Any:
            result = function(self._orig_mod, *args, **kwargs)
            return self if result is self._orig_mod else result

        return types.MethodType(method, self)  # torch.compile looks at the function of a method

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._orig_mod, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._orig_mod), "lower"})

    def __repr__(self) -> str:
        return f"compile({self._orig_mod!r})"

    # Python looks up these methods on the class.
    __len__ = _of_module(len)
    __bool__ = _of_module(bool)
    __iter__ = _of_module(iter)
    __contains__ = _of_module(operator.contains)
    __getitem__ = _of_module(operator.getitem)
    __setitem__ = _of_module(operator.setitem)
    __delitem__ = _of_module(operator.delitem)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._donate_compiled.remake(copy.deepcopy(self._orig_mod, memo))

    def __copy__(self) -> Any:
        return self._donate_compiled.remake(copy.copy(self._orig_mod))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a compiled {type(self._orig_mod).__name__} cannot be pickled, because its graphs belong to this process. "
            f"Save its state_dict(), or the module in its attribute _orig_mod. {see('compile_errors')}"
        )
