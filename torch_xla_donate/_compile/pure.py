"""compile(f, pure=True): traces the function once for each signature of its arguments, then replays the graph."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch_xla

from torch_xla_donate import _C, _config, _frames, _host, _numbers, _report, _trace, _trees
from torch_xla_donate._compile.arguments import Arguments, CallArguments
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.donation import RepeatedCall, RunDonation, leaves_of_call, signature_of
from torch_xla_donate._compile.program import TracedProgram
from torch_xla_donate._errors import DonationError, see

_CLOSED_OVER = _C.Reason("closed_over")


class _Call(NamedTuple):
    """The flattened arguments of a call, their signature, and what else its program depends on (`_state`)."""

    arguments: CallArguments
    state: Hashable
    leaves: list[Any]
    structures: Sequence[Hashable]
    signature: _C.Signature


def _first_places(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each tensor the first place of the same object. Two tensors of one buffer have separate gradients."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(leaf), i) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))


class PureCompiled(Compiled):
    """Traces the function once for each signature, then runs the compiled graph on the arguments of each call."""

    traces_floats = True

    def __init__(
        self,
        f: Callable[..., Any],
        arguments: Arguments,
        strict: _config.Strict,
        *,
        name: str | None = None,
        full_graph: bool = True,
        max_different_graphs: int | None = None,
    ) -> None:
        super().__init__(f, arguments, strict)
        self._graph_name = name or arguments.function
        self._limit = max_different_graphs
        self._programs: dict[Hashable, TracedProgram] = {}
        self._last: dict[Hashable, TracedProgram] = {}  # by what `_state` returns, and the device

    def _trace(self, *args: Any, **kwargs: Any) -> Any:
        with _host.graph_name(self._graph_name):
            return self._f(*args, **kwargs)

    def _run(self, arguments: CallArguments, where: str) -> Any:
        _host.run_step_closures()
        state = self._state(arguments)
        repeated = self._repeat(arguments, state, where)
        if repeated is not None:
            return repeated[0]
        leaves, parts = leaves_of_call(arguments)
        signature = signature_of(leaves)
        with self.on_device(arguments, signature.devices):
            if signature.pending:
                torch_xla.sync()
                signature = signature_of(leaves)
            call = _Call(arguments, state, leaves, [structure for _, structure in parts], signature)
            if not arguments.roles.donated:
                return self._run_once(call, None)
            with RunDonation(self, arguments, parts, where) as donation:
                return self._run_once(call, donation)

    def _state(self, arguments: CallArguments) -> Hashable:
        """What a program depends on besides the device and the leaves of the call. Static 1, 1.0 and True differ."""
        return (
            id(arguments.roles),
            *map(_trees.exact, arguments.values(arguments.roles.static)),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _host.autocast_state(),
            torch.get_default_dtype(),
            _host.in_dual_level(),
        )

    def _repeat(self, arguments: CallArguments, state: Hashable, where: str) -> tuple[Any] | None:
        """The result of a call whose arguments are like those of the last one; None if they are not."""
        program = self._last.get((state, _host.current_device()))
        if program is None or program.replay is None or _report.no_donation() or not program.is_current(()):
            return None
        try:
            with RepeatedCall(program.replay, arguments, where, self.strictness()) as call:
                return (program.run(call.begun.leaves),) if call.begun is not None else None
        except RuntimeError as error:
            if not _host.is_evicted(error):
                raise
        return None  # the general way traces again

    def _run_once(self, call: _Call, donation: RunDonation | None) -> Any:
        try:
            return self._replay(call, donation)
        except RuntimeError as error:
            if not _host.is_evicted(error):
                raise
        self._programs.clear()  # torch_xla has probably dropped the others as well
        self._last.clear()
        return self._replay(call, donation)

    def _replay(self, call: _Call, donation: RunDonation | None) -> Any:
        while True:
            key = (
                call.state,
                _host.current_device(),
                *call.structures,
                call.signature.key,
                donation.choice() if donation is not None else None,
                self._values(call.signature.others),
                *map(_trees.same, call.signature.hooks),
                _host.shardings(call.leaves),
                () if call.signature.distinct else _first_places(call.leaves),
            )
            program = self._programs.get(key)
            if program is None or not program.is_current(call.leaves):
                program = self._trace_program(key, call, donation)
            if donation is None or not program.captured or not donation.refuse(program.captured, _CLOSED_OVER):
                break
        if donation is None:
            return program.run(call.leaves)
        if program.returned:
            _C.keep_returned([call.leaves[i] for i in program.returned])
        if program.replay is not None:
            self._last[call.state, _host.current_device()] = program
        with program.consumed(donation, call.leaves):
            return program.run(call.leaves)

    def _values(self, others: Sequence[Any]) -> Hashable:
        """The leaves that are not tensors, for the program's key. 1, 1.0 and True differ."""
        for value in others:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{self.function} is declared pure, but a leaf of its arguments is of type "
                    f"{type(value).__name__}, which is neither a tensor nor hashable. Register its class with "
                    f"torch.utils._pytree, or pass a hashable value. {see('pure')}"
                ) from None
        # Floats among the leaves are inputs of the graph.
        return tuple("float" if _numbers.is_float(value) else _trees.exact(value) for value in others)

    def _refuse_others(self, leaves: Sequence[Any]) -> None:
        elsewhere = _trees.first_off_device(leaves)
        if elsewhere is not None:
            raise ValueError(
                f"{self.function} is declared pure, but one of its arguments holds {_trees.dtype_and_shape(elsewhere)} "
                f"on {elsewhere.device}, which would become a constant of the graph. Move it with .to('xla'). "
                f"{see('pure')}"
            )

    def _trace_program(self, key: Hashable, call: _Call, donation: RunDonation | None) -> TracedProgram:
        self._refuse_others(call.leaves)
        if self._limit is not None and key not in self._programs and len(self._programs) >= self._limit:
            raise RuntimeError(
                f"{self.function} would get more than max_different_graphs={self._limit} graphs, because its arguments "
                "differ in structure, shape, dtype or value from those before. Pass arguments like those, or raise the "
                f"limit. {see('pure')}"
            )
        offered = donation.positions(call.leaves) if donation is not None else ()
        handled = sys.exc_info()[1]
        try:
            program = TracedProgram(self._trace, self.function, call.arguments, offered)
        except DonationError as error:
            # Its frames hold the arguments' buffers, which another function may donate while the error is alive.
            _frames.forget_values(error, handled, of_user=True)
            raise
        shared = donation.newly_shared() if donation is not None else []
        kept = [call.leaves[leaf] for leaf in shared if leaf in program.donors]
        if kept:  # by what was made where the trace does not look: in an operation of a user, or by a hook of autograd
            raise _trace.Refusal(self.function)(
                f"computes something from {_trees.dtype_and_shape(kept[0])} that a hook, an operation or "
                "something outside the function keeps",
                "Return it",
                "",
            )
        self._programs[key] = program
        if donation is not None and donation.is_whole():
            names = self.names(call.arguments, call.structures[: len(call.arguments.roles.donated)])
            program.set_replay(call.structures, call.signature, call.leaves[: donation.count], names)
        return program
