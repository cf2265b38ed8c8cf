"""compile(f): traces the function at every call, as `torch_xla.compile` does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch_xla

from torch_xla_donate import _C, _config, _host, _trees
from torch_xla_donate._compile.arguments import Arguments, CallArguments
from torch_xla_donate._compile.base import Compiled, check_static
from torch_xla_donate._compile.donation import NOT_READ, mark_donated
from torch_xla_donate._errors import DonationError, see

if TYPE_CHECKING:
    from torch_xla_donate._compile.lower import Lowered


class LazyCompiled(Compiled):
    """Traces and runs the function at every call, as `torch_xla.compile` does."""

    def __init__(self, f: Callable[..., Any], arguments: Arguments, strict: _config.Strict, **options: Any) -> None:
        super().__init__(f, arguments, strict)
        options.setdefault("name", arguments.function)
        self._step = torch_xla.compile(self._trace, **options)

    def _run(self, call: CallArguments, where: str) -> Any:
        marked: list[_C.Call] = []
        parts = call.flattened(call.roles.nonstatic) if call.roles.donated else None
        devices = _C.devices([leaf for leaves, _ in parts or () for leaf in leaves])
        try:
            # The step runs on the current device. It can donate no other device's buffers.
            with _host.on_device(devices if len(devices) == 1 else ()):
                result = self._step(call, where, marked, parts)
        except BaseException:
            # f has returned, but torch_xla refused its step (max_different_graphs) or the step failed.
            for marks in marked:
                _C.cancel_call(marks)
            raise
        for marks in marked:
            _C.end_call(marks, {}, NOT_READ, notify=True)
        return result

    def _trace(
        self,
        call: CallArguments,
        where: str,
        marked: list[_C.Call],
        parts: list[tuple[list[Any], Hashable]] | None,
    ) -> Any:
        # torch_xla has just run all pending work, so marks made here are for the step of this function.
        if parts is None:
            return self._f(*call.args, **call.kwargs)
        marks = mark_donated(self, call, parts, where, for_compiled_run=False)
        try:
            parts.clear()  # the function may drop an argument
            result = self._f(*call.args, **call.kwargs)
            _C.keep_returned(_trees.tensors_in(result))
            marked.append(marks)
        except BaseException:
            _C.cancel_call(marks)
            raise
        return result


class PlainCompiled(Compiled):
    """While `TORCH_XLA_DONATE=0` switches the package off: runs the function, and then all pending work.

    For all backends, since each computes the same values.
    """

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for argument in self._arguments.roles(args, kwargs).static:
            check_static(argument, argument.value(args, kwargs))
        torch_xla.sync()  # pending work is a step of its own
        result = self.body(*args, **kwargs)
        torch_xla.sync()
        return result

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Raises DonationError, because a lowering without the package has neither donors nor their outcome."""
        raise DonationError(
            f"lower of {self.function} needs the hooks, which TORCH_XLA_DONATE=0 keeps out of this process. Unset it "
            f"to lower a function. {see('switched_off')}"
        )
