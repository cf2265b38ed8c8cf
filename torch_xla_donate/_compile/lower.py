"""compile(...).lower(*args): traces and compiles a function without running it or consuming its arguments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _host, _numbers, _trace, _trees
from torch_xla_donate._compile import log
from torch_xla_donate._compile.arguments import ArgumentRoles, CallArguments
from torch_xla_donate._compile.floats import put_numbers, upload_floats
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._host import interrupts

if TYPE_CHECKING:
    from torch_xla_donate._compile.base import Compiled


@dataclasses.dataclass(frozen=True)
class ArgInfo:
    """A tensor leaf of the arguments.

    Attributes:
        shape: sizes of the whole array.
        dtype: the torch dtype.
        donated: whether a call donates its buffer. False if torch_xla ignores donors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    donated: bool

    def __str__(self) -> str:
        return _trees.dtype_and_shape(self)


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes of one run on one device, as XLA counts them. Arguments and outputs both include the aliased bytes.

    `peak_bytes` is the sum of arguments, outputs and temporaries. It counts aliased bytes once.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


class Lowered:
    """A function traced for certain arguments. `Compiled.lower` makes it."""

    def __init__(self, compiled: Compiled, roles: ArgumentRoles, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._compiled = compiled
        self._roles = roles
        _refuse_others(compiled.function, [*args, *kwargs.values()])
        # Placeholders replace the arguments. The trace then neither holds nor changes these.
        self._args, self._kwargs = pytree.tree_map(Placeholders(), (args, kwargs))
        self._types = Types(roles, args, kwargs, floats_are_inputs=compiled.traces_floats)
        with self._traced() as (outputs, donors):
            self._text = _host.hlo_text(outputs, donors)
        log.dump_lowered(compiled.function, self.as_text)

    @contextmanager
    def _traced(self) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """The outputs of a step, and the tensors that it would donate (none if torch_xla ignores donors)."""
        function = self._compiled.function
        call = CallArguments(self._roles, self._args, self._kwargs)
        donated, kept = (
            [leaf for value in call.values(arguments) for leaf in _trees.leaves_of(value)]
            for arguments in (self._roles.donated, self._roles.kept)
        )
        floats = upload_floats([*donated, *kept]) if self._compiled.traces_floats else None
        with _host.tracing(), _optimizers_restored([*self._args, *self._kwargs.values()]):
            call, numbers = put_numbers(function, call, floats)
            observer = Observer(function, [*donated, *kept])
            given = [_host.same_buffer(leaf) for leaf in donated if _is_materialised(leaf)]
            try:
                with interrupts.Restored(), _trace.Restoring(observer):
                    with observer.reads, observer:
                        results = pytree.tree_leaves(self._compiled.body(*call.args, **call.kwargs))
                    given_floats = {id(one) for one in numbers}
                    results = [_numbers.as_result(leaf) for leaf in results if id(leaf) not in given_floats]
                    returned = {_C.identity(tensor)[1] for tensor in _trees.tensors_in(results)} - {0}
                    donors = [tensor for tensor in given if _C.identity(tensor)[1] not in returned]
                    donors += observer.replaced()
                    yield _host.pending([*results, *observer.changed()]), [] if _host.ignores_donors() else donors
            finally:
                # Pending work may depend on placeholders. It must never run.
                _host.forget_pending()

    @property
    def args_info(self) -> Any:
        """``(args, kwargs)`` with an `ArgInfo` instead of each tensor. Other leaves are unchanged.

        A registered class may raise an error if its unflatten function takes only tensors.
        """
        return self._types.tree()

    def as_text(self) -> str:
        """HLO before optimisation; ``buffer_donor`` lists the donated parameters."""
        return self._text

    def compile(self) -> Executable:
        """Compiles for the device, and keeps the executable for later steps.

        Raises:
            DonationError: an argument is a placeholder, and auto-sharding is on.
        """
        self._refuse_what_cannot_be_resharded()
        with self._traced() as (outputs, donors), log.compilations(self._compiled.function):
            graph = _host.compile_graph(outputs, donors).hash
        text, memory = _host.describe_graph(graph) if graph is not None else (self._text, "")
        return Executable(self._compiled, self._types, text, memory)

    def _refuse_what_cannot_be_resharded(self) -> None:
        """Raises DonationError for placeholders under auto-sharding: torch_xla reshards arguments when it compiles."""
        if not _host.auto_sharding():
            return
        for leaf in pytree.tree_leaves((self._args, self._kwargs)):
            if _is_materialised(leaf) and not _C.has_value(leaf):
                raise DonationError(
                    f"{self._compiled.function} cannot be compiled for the placeholder {_trees.dtype_and_shape(leaf)}, "
                    f"because torch_xla reshards the arguments with {_host.ignores_donors()}. Lower the function for "
                    f"tensors with values, or call xr.use_spmd() and mark the shardings. {see('switched_off')}"
                )


class Executable:
    """A function compiled for certain arguments. `Lowered.compile` makes it. Call it like the function."""

    def __init__(self, compiled: Compiled, types: Types, text: str, memory: str) -> None:
        self._compiled = compiled
        self._types = types
        self._text = text
        self._memory = memory

    @property
    def args_info(self) -> Any:
        """As `Lowered.args_info`."""
        return self._types.tree()

    def as_text(self) -> str:
        """HLO after optimisation; ``input_output_alias`` lists the parameters whose memory outputs reuse."""
        return self._text

    def memory_analysis(self) -> MemoryAnalysis:
        """The bytes of a run on one device. Raises RuntimeError if the platform does not report them."""
        sizes = dict(re.findall(r"(\w+)_size_in_bytes=(\d+)", self._memory))
        try:
            return MemoryAnalysis(
                argument_bytes=int(sizes["argument"]),
                output_bytes=int(sizes["output"]),
                alias_bytes=int(sizes["alias"]),
                temp_bytes=int(sizes["temp"]),
                generated_code_bytes=int(sizes["generated_code"]),
            )
        except KeyError:
            raise RuntimeError(
                f"this platform reports no memory statistics (XLA returned {self._memory!r}). Read the shapes in "
                f"as_text() instead. {see('ahead')}"
            ) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._types.check(self._compiled.function, args, kwargs)
        return self._compiled(*args, **kwargs)


class Types:
    """The types of a call's arguments, leaf by leaf."""

    def __init__(
        self, roles: ArgumentRoles, args: Sequence[Any], kwargs: Mapping[str, Any], *, floats_are_inputs: bool = False
    ) -> None:
        static = {argument.key for argument in roles.static}
        donated = set() if _host.ignores_donors() else {argument.key for argument in roles.donated}
        arguments = (*enumerate(args), *kwargs.items())
        leaves = [(key, leaf) for key, value in arguments for leaf in pytree.tree_leaves(value)]
        self._inputs = [floats_are_inputs and key not in static and _numbers.is_float(leaf) for key, leaf in leaves]
        self._infos = [_info(leaf, key in donated) for key, leaf in leaves]
        self._spec = pytree.tree_structure((args, kwargs))

    def tree(self) -> Any:
        """``(args, kwargs)`` with an `ArgInfo` for each tensor."""
        return pytree.tree_unflatten(self._infos, self._spec)

    def check(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises TypeError unless the arguments have these types."""
        spec = pytree.tree_structure((args, kwargs))
        if self._spec != spec:
            raise TypeError(
                f"{function} was compiled for arguments of the structure {self._spec}, but this call has {spec}. Call "
                f"the function itself, or lower() it for these arguments. {see('ahead')}"
            )
        found, paths = _trees.with_paths((args, kwargs))
        differing = []
        for index, (info, leaf) in enumerate(zip(self._infos, found)):
            now: Any = _info(leaf, getattr(info, "donated", False))
            if now != info and not (self._inputs[index] and _numbers.is_float(leaf)):
                _, key, *path = map(str, paths.place(index))
                place = f"argument {key[1:-1]}{''.join(path)}"
                differing.append(f"{place}: compiled for {info}, called with {now}")
        if differing:
            shown = "; ".join(differing[:5]) + (f"; and {len(differing) - 5} more" if len(differing) > 5 else "")
            raise TypeError(
                f"{function} was compiled for other types of arguments: {shown}. Call the function itself, or lower() "
                f"it for these arguments. {see('ahead')}"
            )


class Observer(_trace.Recorder):
    """Watches a trace that may change tensors from outside, which a step may do."""

    def __init__(self, function: str, arguments: Sequence[Any]) -> None:
        super().__init__(function, arguments)
        self._on_host: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        gradients = [leaf.grad for leaf in self._arguments if leaf.is_leaf]
        self._snapshots += [
            _trace.TensorSnapshot(grad) for grad in gradients if grad is not None and _is_materialised(grad)
        ]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.device.type == "cpu" and id(leaf) not in self._on_host:
                self._on_host[id(leaf)] = (leaf, leaf.detach().clone())
            elif leaf.device.type == "xla":
                self._read(leaf)
        return self._call_with_numbers(func, args, kwargs or {})

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
            "XLA tensors. Move it with .to('xla'), or use torch_xla.core.xla_builder.create_placeholder_tensor. "
            f"{see('ahead')}"
        )


def _is_materialised(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla" and _C.identity(leaf)[1] != 0


class Placeholders:
    """Makes placeholders for materialised tensors. Tensors that share a buffer get placeholders that share one."""

    def __init__(self) -> None:
        self._by_id: dict[int, torch.Tensor] = {}
        self._by_buffer: dict[int, tuple[int, torch.Tensor]] = {}

    def __call__(self, leaf: Any) -> Any:
        # A placeholder cannot be sharded.
        if not _is_materialised(leaf) or _host.sharding_spec(leaf) or _host.auto_sharding():
            return leaf
        if id(leaf) not in self._by_id:
            self._by_id[id(leaf)] = self._make(leaf)
        return self._by_id[id(leaf)]

    def _make(self, leaf: torch.Tensor) -> torch.Tensor:
        identity, buffer = _C.identity(leaf)
        known = self._by_buffer.get(buffer)
        if known is None:
            empty = _host.placeholder(leaf)
            self._by_buffer[buffer] = (identity, empty.detach())
        else:
            empty = known[1].detach() if known[0] == identity else _host.same_buffer(known[1])
            empty.requires_grad_(leaf.requires_grad)
        return torch.nn.Parameter(empty, leaf.requires_grad) if isinstance(leaf, torch.nn.Parameter) else empty


def _info(leaf: Any, donated: bool) -> Any:
    return ArgInfo(tuple(leaf.shape), leaf.dtype, donated) if isinstance(leaf, torch.Tensor) else leaf
