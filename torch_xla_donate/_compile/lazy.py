"""compile(f): traces the function at every call, as `torch_xla.compile` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch_xla

from torch_xla_donate import _C, _config, _trees
from torch_xla_donate._compile.arguments import Arguments, CallArguments
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.donated import NOT_READ, DonatedArguments


class LazyCompiled(Compiled):
    """Traces and runs the function at every call, as `torch_xla.compile` does."""

    def __init__(self, f: Callable[..., Any], arguments: Arguments, strict: _config.Strict, **options: Any) -> None:
        super().__init__(f, arguments, strict)
        options.setdefault("name", arguments.function)
        self._step = torch_xla.compile(self._trace, **options)

    def _run(self, call: CallArguments, where: str) -> Any:
        marked: list[_C.Call] = []
        try:
            result = self._step(call, where, marked)
        except BaseException:
            # f has returned, but torch_xla refused its step (max_different_graphs) or the step failed.
            for marks in marked:
                _C.cancel_call(marks)
            raise
        for marks in marked:
            _C.end_call(marks, {}, NOT_READ, notify=True)
        return result

    def _trace(self, call: CallArguments, where: str, marked: list[_C.Call]) -> Any:
        # torch_xla has just run all pending work, so marks made here are for the step of this function.
        if not call.roles.donated:
            return self._f(*call.args, **call.kwargs)
        marks = DonatedArguments(self, call).mark(where, for_compiled_run=False)
        try:
            result = self._f(*call.args, **call.kwargs)
        except BaseException:
            _C.cancel_call(marks)
            raise
        _C.keep_returned(_trees.tensors_in(result))
        marked.append(marks)
        return result
