"""compile(...).lower(*args): traces and compiles a function without running it or consuming its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _host, _marks, _numbers, _trace, _trees, hlo
from torch_xla_donate._compile.arguments import CallArguments
from torch_xla_donate._compile.executable import Executable, Lowerable, Types
from torch_xla_donate._compile.floats import put_numbers, upload_floats
from torch_xla_donate._compile.placeholders import Placeholders, is_materialised
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._host import interrupts


class Lowered:
    """A function traced for certain arguments. `Compiled.lower` makes it."""

    def __init__(self, compiled: Lowerable, call: CallArguments) -> None:
        self._compiled = compiled
        call.flattened(call.roles.nonstatic)  # may raise
        _refuse_others(compiled.function, [*call.args, *call.kwargs.values()])
        # Placeholders replace the arguments. The trace then neither holds nor changes these.
        made = Placeholders()

        def replaced(leaf: Any) -> Any:
            is_replaceable = is_materialised(leaf) and not _host.auto_sharding()
            return made(leaf, _host.op_sharding(leaf)) if is_replaceable else leaf

        self._call = CallArguments(call.roles, *pytree.tree_map(replaced, (call.args, call.kwargs)))
        self._types = Types(call, floats_are_inputs=compiled.traces_floats)
        self._refuse_kept_donors()
        with self._traced() as (outputs, donors):
            self._text, _ = _host.hlo_text(outputs, donors)

    @contextmanager
    def _traced(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The outputs of a step, and the tensors that it would donate (none if torch_xla ignores donors)."""
        function = self._compiled.function
        call = self._call
        donated, kept = (call.leaves(arguments)[0] for arguments in (call.roles.donated, call.roles.kept))
        floats = upload_floats([*donated, *kept]) if self._compiled.traces_floats else None
        with _host.Tracing(), _optimizers_restored([*call.args, *call.kwargs.values()]):
            _host.show_shardings([leaf for leaf in [*donated, *kept] if is_materialised(leaf)])
            refuse = _trace.Refusal(function, is_pure=self._compiled.traces_floats)
            call, numbers = put_numbers(call, floats, refuse)
            recorder = LoweringRecorder(refuse, [*donated, *kept])
            given = [_host.same_buffer(leaf) for leaf in donated if is_materialised(leaf)]
            try:
                with interrupts.Restored(), _trace.Restoring(recorder):
                    with _trace.host_reads_refused(refuse), recorder.reads, recorder:
                        _C.refuse_reads(True)
                        result = self._compiled.body(*call.args, **call.kwargs)
                        results, _ = _trees.flatten_fast(result, f"the result of {function}")
                        _C.refuse_reads(False)
                    given_floats = {id(one) for one in numbers}
                    results = [_numbers.as_result(leaf) for leaf in results if id(leaf) not in given_floats]
                    returned = {_C.identity(tensor)[1] for tensor in _trees.tensors_in(results)} - {0}
                    donors = [tensor for tensor in given if _C.identity(tensor)[1] not in returned]
                    donors += recorder.replaced()
                    yield _host.pending([*results, *recorder.changed()]), [] if _host.ignores_donors() else donors
            finally:
                # Pending work may depend on placeholders. It must never run.
                _host.forget_pending()
                recorder.forget_nodes()

    @property
    def args_info(self) -> Any:
        """``(args, kwargs)`` with an `ArgInfo` instead of each tensor. Other leaves are unchanged.

        A registered class may raise an error if its unflatten function takes only tensors.
        """
        return self._types.tree()

    def as_text(self) -> str:
        """HLO before optimisation; ``buffer_donor`` lists the donated parameters."""
        return self._text

    def compile(self, topology: str | None = None) -> Executable:
        """Compiles for this device and keeps the executable for later steps, or compiles for TPUs that are not there.

        Args:
            topology: generation and chips of TPUs, such as ``v6e:4x8`` (see `hlo.compile_for`). The result describes
                the step on one of these devices, and cannot be called.

        Raises:
            DonationError: an argument is a placeholder, and auto-sharding is on.
            ValueError: the topology does not exist or is too small, or the function computes nothing.
            ImportError: the TPU compiler is not installed.
            RuntimeError: the compiler failed, for instance because a device has too little memory.
        """
        if topology is not None:
            return self._compile_for(topology)
        self._refuse_what_cannot_be_resharded()
        names = self._names()
        with self._traced() as (outputs, donors):
            text, buffers = _host.hlo_text(outputs, donors)
            graph = _host.compile_graph(outputs, donors)
            ordered = [_C.identity(tensor)[1] for tensor in graph.inputs]
        if graph.hash is None:
            return Executable(self._compiled, self._types, None, "", "", [])
        places = {buffer: place for place, buffer in enumerate(buffers)}
        before = hlo.parse(text).reordered([places[buffer] for buffer in ordered])
        named = [names.get(buffer, "") for buffer in ordered]
        return Executable(self._compiled, self._types, before, *_host.describe_graph(graph.hash), named)

    def _refuse_kept_donors(self) -> None:
        """Raises ValueError for a buffer that is donated and passed as another argument, too, as a call does."""
        donated, kept = map(self._call.leaves, (self._call.roles.donated, self._call.roles.kept))
        number_of = {_C.identity(leaf)[1]: number for number, leaf in enumerate(donated[0]) if is_materialised(leaf)}
        for number, leaf in enumerate(kept[0]):
            if is_materialised(leaf) and _C.identity(leaf)[1] in number_of:
                raise _marks.passed_twice(donated[1].name(number_of[_C.identity(leaf)[1]]), kept[1].name(number))

    def _compile_for(self, topology: str) -> Executable:
        from torch_xla_donate.hlo.topology import compile_module, size_rule_of

        rule = size_rule_of(topology)
        names = self._names()
        with self._traced() as (outputs, donors):
            text, buffers = _host.hlo_text(outputs, donors)
            if not text:
                raise ValueError(
                    f"{self._compiled.function} computes nothing on the device, so it cannot be compiled for "
                    f"{topology}. Return the results of the step. {see('tpu')}"
                )
            with _host.size_rule(rule):
                order = _host.parameter_order(outputs, donors, buffers)
        module = compile_module(hlo.parse(text), text, topology, order)
        named = [names.get(buffers[number], "") for number in order]
        return Executable(
            self._compiled, self._types, module.before, module.as_text(), module.memory, named, module.topology
        )

    def _names(self) -> dict[int, str]:
        """The name of each buffer that an argument holds, which the trace may replace by another."""
        leaves, names = self._call.leaves(self._call.roles.nonstatic)
        return {_C.identity(leaf)[1]: names.name(i) for i, leaf in enumerate(leaves) if is_materialised(leaf)}

    def _refuse_what_cannot_be_resharded(self) -> None:
        """Raises DonationError for placeholders under auto-sharding: torch_xla reshards arguments when it compiles."""
        if not _host.auto_sharding():
            return
        for leaf in pytree.tree_leaves((self._call.args, self._call.kwargs)):
            if is_materialised(leaf) and not _C.has_value(leaf):
                raise DonationError(
                    f"{self._compiled.function} cannot be compiled for the placeholder {_trees.dtype_and_shape(leaf)}, "
                    f"because torch_xla reshards the arguments with {_host.ignores_donors()}. Lower the function for "
                    f"tensors with values, or call xr.use_spmd() and mark the shardings. {see('ahead')}"
                )


class LoweringRecorder(_trace.Recorder):
    """Watches a trace that may change tensors from outside, which a step may do."""

    def __init__(self, refuse: _trace.Refusal, arguments: Sequence[Any]) -> None:
        super().__init__(refuse, arguments)
        self._on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        gradients = [leaf.grad for leaf in self._arguments if leaf.is_leaf]
        self._snapshots += [
            _trace.TensorSnapshot(grad) for grad in gradients if grad is not None and is_materialised(grad)
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.device.type == "cpu" and id(leaf) not in self._on_host:
                self._on_host[id(leaf)] = (leaf, leaf.detach().clone())
            elif leaf.device.type == "xla":
                known = len(self._snapshots)
                if leaf._base is not None:  # a write through a view changes its base
                    self._read(leaf._base)
                self._read(leaf)
                if len(self._snapshots) > known:  # the first use of a tensor from outside
                    _host.show_shardings([leaf])
        result = self._call(func, args, kwargs or {})
        self.made += [(weakref.ref(leaf), "") for leaf in _trace.tensors_of(result) if leaf.device.type == "xla"]
        return result

    def forget_nodes(self) -> None:
        """Drops the placeholders' nodes of the trace, so that a later use of one passes the hooks.

        What the function keeps outside, such as the state of an optimizer, has no value: a step that reads it raises.
        """
        for reference, _ in self.made:
            kept = reference()
            if kept is not None and is_materialised(kept) and not _C.has_value(kept):
                _C.note_placeholder(kept)
        for tensor in [*self._arguments, *self.captured.values()]:
            _C.drop_node(tensor)

    def restore(self) -> None:
        super().restore()
        with torch.no_grad():
            for tensor, value in self._on_host.values():
                if not torch.equal(tensor, value):
                    tensor.copy_(value)

    def changed(self) -> list[torch.Tensor]:
        """Tensors from outside to which the trace has given new values, and their gradients."""
        tensors = [snapshot.tensor for snapshot in self._snapshots]
        gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
        return [*tensors, *gradients]

    def replaced(self) -> list[torch.Tensor]:
        """The buffers of tensors with new values. torch_xla donates them automatically."""
        return [snapshot.same for snapshot in self._snapshots if snapshot.is_replaced()]


@contextmanager
def _optimizers_restored(arguments: Sequence[Any]) -> Iterator[None]:
    """Restores the state of optimizers, because a traced first step must not leave any."""
    optimizers = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.optim.Optimizer)]
    saved = [{key: dict(state) for key, state in optimizer.state.items()} for optimizer in optimizers]
    try:
        yield
    finally:
        for optimizer, states in zip(optimizers, saved):
            optimizer.state.clear()
            optimizer.state.update(states)


def _refuse_others(function: str, arguments: Sequence[Any]) -> None:
    elsewhere = _trees.first_off_device(pytree.tree_leaves(arguments))
    if elsewhere is not None:
        raise ValueError(
            f"{function} cannot be lowered for {_trees.dtype_and_shape(elsewhere)} on {elsewhere.device}, only for "
            "XLA tensors. Move it with .to('xla'), or lower with placeholder_like() of the arguments. "
            f"{see('ahead')}"
        )
