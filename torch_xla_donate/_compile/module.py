"""compile(module): a proxy that runs the module as one step and otherwise behaves like the module."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from torch_xla_donate._errors import see

if TYPE_CHECKING:
    from torch_xla_donate._compile.base import Compiled
    from torch_xla_donate._compile.lower import Lowered


class ModuleProxy:
    """Runs calls as one step. Attributes, parameters and methods are the module's, also for ``isinstance``.

    A method that returns the module (``train()``, ``to()``) returns this object: ``m = m.eval()`` stays compiled.

    Args:
        compiled: the compiled module.
        remake: compiles another module with the same options.
    """

    def __init__(self, compiled: Compiled, remake: Callable[[torch.nn.Module], Any]) -> None:
        object.__setattr__(self, "_donate_compiled", compiled)
        object.__setattr__(self, "_donate_remake", remake)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._donate_compiled(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the module for these arguments, without running it: as for a function."""
        return self._donate_compiled.lower(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def _orig_mod(self) -> torch.nn.Module:
        """The module. torch.compile uses the same name."""
        return self._donate_compiled.__wrapped__  # type: ignore[no-any-return, attr-defined]

    @property
    def __wrapped__(self) -> torch.nn.Module:
        return self._orig_mod

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._orig_mod)

    def __getattr__(self, name: str) -> Any:
        module = self._orig_mod
        value = getattr(module, name)
        if not inspect.ismethod(value) or value.__self__ is not module:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self if result is module else result

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._orig_mod, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._orig_mod), "lower"})

    def __repr__(self) -> str:
        return f"compile({self._orig_mod!r})"

    # Python looks up these methods on the class.
    def __len__(self) -> int:
        return len(self._orig_mod)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._orig_mod)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._orig_mod)  # type: ignore[call-overload, operator, no-any-return]

    def __contains__(self, item: Any) -> bool:
        return item in self._orig_mod  # type: ignore[operator]

    def __getitem__(self, key: Any) -> Any:
        return self._orig_mod[key]  # type: ignore[index, operator]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._orig_mod[key] = value  # type: ignore[index, operator]

    def __delitem__(self, key: Any) -> None:
        del self._orig_mod[key]  # type: ignore[attr-defined, operator]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._donate_remake(copy.deepcopy(self._orig_mod, memo))

    def __copy__(self) -> Any:
        return self._donate_remake(copy.copy(self._orig_mod))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a compiled {type(self._orig_mod).__name__} cannot be pickled, because its graphs belong to this process. "
            f"Save its state_dict(), or the module in its attribute _orig_mod. {see('compile')}"
        )
