"""compile(f): traces the function at every call, as `torch_xla.compile` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_xla_donate import _C, _trees
from torch_xla_donate._compile.arguments import ArgumentRoles, Arguments
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.donated import NOT_READ, DonatedArguments


class LazyCompiled(Compiled):
    """Traces and runs the function at every call, as `torch_xla.compile` does."""

    def __init__(self, f: Callable[..., Any], arguments: Arguments, strict: bool | None, **options: Any) -> None:
        super().__init__(f, arguments, strict)
        import torch_xla

        options.setdefault("name", arguments.function)
        self._step = torch_xla.compile(self._trace, **options)

    def _run(self, roles: ArgumentRoles, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        calls: list[_C.Call] = []
        try:
            result = self._step(roles, args, kwargs, where, calls)
        except BaseException:
            # f has returned, but torch_xla refused its step (max_different_graphs) or the step failed.
            for call in calls:
                _C.cancel_call(call)
            raise
        for call in calls:
            _C.end_call(call, {}, NOT_READ, notify=True)
        return result

    def _trace(
        self, roles: ArgumentRoles, args: tuple[Any, ...], kwargs: dict[str, Any], where: str, calls: list[_C.Call]
    ) -> Any:
        # torch_xla has just run all pending work, so marks made here are for the step of this function.
        if not roles.donated:
            return self._f(*args, **kwargs)
        call = DonatedArguments(self, roles, args, kwargs).mark(args, kwargs, where, for_compiled_run=False)
        try:
            result = self._f(*args, **kwargs)
        except BaseException:
            _C.cancel_call(call)
            raise
        _C.keep_returned(_trees.tensors_in(result))
        calls.append(call)
        return result
