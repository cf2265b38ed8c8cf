"""compile(f, pure=True): the function is traced once for each signature of its arguments, and replayed afterwards."""

from __future__ import annotations

import contextlib
import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch_xla
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xla_donate import _C, _arguments, _donate, _errors, _host, _leaves, _log, _runs
from torch_xla_donate._arguments import Arguments, Plan
from torch_xla_donate._compile import Compiled, Donated


class Recorder(TorchFunctionMode):
    """Watches a trace at the level of torch's functions: what it reads from outside, and what it changes there.

    Attributes:
        captured: the tensors that the function uses and has not been given, by identity.
        given: the identities of those that it has been given.
    """

    def __init__(self, function: str, arguments: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function
        self._arguments = [leaf for leaf in arguments if isinstance(leaf, torch.Tensor)]
        self.given = {_C.identity(leaf)[0] for leaf in self._arguments}
        self.captured: dict[int, torch.Tensor] = {}
        self._before = [Before(leaf) for leaf in self._arguments if leaf.device.type == "xla"]
        self._made: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._made_on_host: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = [(tensor, *self._read(tensor)) for tensor in _tensors((args, kwargs))]
        result = func(*args, **kwargs)
        for tensor, identity, buffer in used:
            if buffer and _C.identity(tensor) != (identity, buffer):
                raise self._updated(tensor, identity)
            # A write through a view changes its base.
            base = tensor._base if tensor.device.type == "xla" and not buffer else None
            if base is not None and _C.identity(base)[0] not in self._outside() and self._was_outside(base):
                raise self._updated(base, 0)
        for tensor in _tensors(result):
            if tensor.device.type == "cpu":
                self._made_on_host.add(tensor)
            elif not _C.identity(tensor)[1]:
                self._made.append((weakref.ref(tensor), _donate.call_site()))
        return result

    def _read(self, tensor: torch.Tensor) -> tuple[int, int]:
        if tensor.device.type != "xla":
            if tensor.device.type == "cpu" and tensor not in self._made_on_host:
                raise self._impure(
                    f"reads {_leaves.array(tensor)} on {tensor.device}, which a replay would not read again",
                    "Move it to the XLA device outside, or make it an argument",
                )
            return 0, 0
        identity, buffer = _C.identity(tensor)
        if buffer and identity not in self.given:
            known = self.captured.get(identity)
            if known is None:
                self._before.append(Before(tensor))
            if known is None or isinstance(tensor, torch.nn.Parameter):
                self.captured[identity] = tensor
        return identity, buffer

    def _outside(self) -> set[int]:
        return self.given | self.captured.keys()

    def _was_outside(self, base: torch.Tensor) -> bool:
        return any(base is tensor for tensor in [*self._arguments, *self.captured.values()])

    def _updated(self, tensor: torch.Tensor, identity: int) -> Exception:
        which = "an argument" if identity in self.given or any(tensor is t for t in self._arguments) else "a tensor"
        return self._impure(
            f"updates {which} from outside, {_leaves.array(tensor)}, in place", "Compute a new tensor and return it"
        )

    def _impure(self, what: str, remedy: str) -> Exception:
        return impure(self._function, _donate.call_site(), what, remedy)

    def restore(self) -> None:
        """Gives the tensors from outside back what they held before the trace."""
        for before in self._before:
            before.restore()

    def check(self, results: Sequence[Any]) -> None:
        """DonationError if the trace has changed something outside in a way that was not seen when it happened."""
        for tensor in [*self._arguments, *self.captured.values()]:
            if _C.identity(tensor)[0] not in self._outside() or not _C.identity(tensor)[1]:
                raise self._updated(tensor, 0)
            if tensor.is_leaf and tensor.grad is not None and _C.has_graph(tensor.grad):
                raise impure(
                    self._function,
                    "unknown line",
                    f"adds to the gradient of {_leaves.array(tensor)}, a tensor from outside",
                    "Use torch.autograd.grad, or call backward() on .detach().requires_grad_() of it",
                )
        returned = {_C.identity(leaf)[0] for leaf in results if isinstance(leaf, torch.Tensor)}

        def leaked() -> list[tuple[torch.Tensor, str]]:
            alive = [(reference(), where) for reference, where in self._made]
            return [(t, where) for t, where in alive if t is not None and _C.identity(t)[0] not in returned]

        if leaked():
            gc.collect()  # what only a reference cycle keeps is garbage
        for tensor, where in leaked():
            if _C.has_graph(tensor):
                raise impure(
                    self._function,
                    where,
                    f"makes {_leaves.array(tensor)}, which something outside of the function keeps",
                    "Return it",
                )


class Before:
    """What a tensor from outside held when the trace came upon it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._buffer = _C.identity(tensor)[1]
        self.same = _host.same_buffer(tensor)

    def is_replaced(self) -> bool:
        return bool(_C.identity(self.tensor)[1] != self._buffer)

    def restore(self) -> None:
        if self.is_replaced():
            with torch.no_grad():
                self.tensor.copy_(self.same)


class HostReads(TorchDispatchMode):
    """Refuses to bring a value to the host, which a replay would not do again."""

    def __init__(self, function: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten._local_scalar_dense or str(kwargs.get("device", "xla")) == "cpu":
            for tensor in _tensors((args, kwargs)):
                if tensor.device.type == "xla":
                    raise impure(
                        self._function, _donate.call_site(), f"reads {_leaves.array(tensor)} on the host", _RETURN_IT
                    )
        return func(*args, **kwargs)


_RETURN_IT = "Return the tensor and read it outside"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def impure(function: str, where: str, what: str, remedy: str) -> _errors.DonationError:
    return _errors.DonationError(
        f"{function} is declared pure, and at {where} it {what}. {remedy}, or take pure=True out. Nothing was donated."
    )


class Slot(NamedTuple):
    """Where a result, or an input of the graph, comes from."""

    kind: str  # "graph", "argument" or "value"
    source: Any


class _Picker:
    """Puts together a list of values that are known and of items of lists that differ from call to call.

    A loop over a thousand slots would take as long as all else that a call does in Python.

    Args:
        slots: where each item comes from.
        sizes: how long the list is that each kind of slot takes items from; the other slots hold values.
    """

    def __init__(self, slots: Sequence[Slot], **sizes: int) -> None:
        *starts, end = itertools.accumulate(sizes.values(), initial=0)
        start_of = dict(zip(sizes, starts))
        self._values = [slot.source for slot in slots if slot.kind not in start_of]
        values = itertools.count(end)
        indices = [start_of[s.kind] + s.source if s.kind in start_of else next(values) for s in slots]
        self._pick: Callable[[list[Any]], Sequence[Any]] = (
            operator.itemgetter(*indices) if len(indices) > 1 else lambda items: [items[i] for i in indices]
        )

    def __call__(self, *lists: Sequence[Any]) -> list[Any]:
        return list(self._pick([*itertools.chain(*lists), *self._values]))


class Program:
    """A traced function: its compiled graph, and where inputs and results come from."""

    def __init__(self, compiled: PureCompiled, plan: Plan, args: Any, kwargs: Any, offered: Sequence[int]) -> None:
        self.name = _runs.graph_name()
        leaves = compiled.leaves(plan, args, kwargs)
        with _host.tracing():
            recorder = Recorder(compiled.function, leaves)
            try:
                with _host_reads_refused(compiled.function), HostReads(compiled.function), recorder:
                    tree = compiled.trace(*args, **kwargs)
                    results, self._structure = pytree.tree_flatten(tree)
                    plain = _C.flatten(tree)
                    self._tokens = None if plain is None else plain[1]
                    del tree
                    results = [self._own(leaf, recorder) for leaf in results]
                _refuse_gradients(compiled.function, results)
                recorder.check(results)
                outputs: dict[int, torch.Tensor] = {}
                for leaf in results:
                    if isinstance(leaf, torch.Tensor) and _C.has_graph(leaf):
                        outputs.setdefault(_C.identity(leaf)[0], leaf)
                places = {identity: place for place, identity in enumerate(outputs)}
                given = {_C.identity(leaf)[0]: i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
                slots = [self._result(leaf, places, given) for leaf in results]
                self.returned = [slot.source for slot in slots if slot.kind == "argument"]
                donors = [i for i in offered if i not in self.returned]
                pending, given_up = list(outputs.values()), [leaves[i] for i in donors]
                _log.dump_lowered(compiled.function, lambda: _host.hlo_text(pending, given_up))
                self._hash, inputs, seeds = _host.compile_graph(pending, given_up)
            finally:
                recorder.restore()
        self._seed = seeds[0] if seeds else None
        by_buffer: dict[int, Slot] = {}
        for tensor in recorder.captured.values():
            by_buffer[_C.identity(tensor)[1]] = Slot("value", tensor)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                by_buffer.setdefault(_C.identity(leaf)[1], Slot("argument", i))
        sources = [by_buffer.get(_C.identity(tensor)[1], Slot("value", tensor)) for tensor in inputs]
        self._inputs = _Picker(sources, argument=len(leaves))
        self._captured = list(recorder.captured.values())
        self._signature = _C.signature(self._captured)[0]
        reads = {slot.source for slot in sources if slot.kind == "argument"}
        self.donors = [i for i in donors if i in reads]
        self.pick_donors = _Picker([Slot("argument", i) for i in self.donors], argument=len(leaves))
        self._picked = _Picker(slots, graph=len(outputs), argument=len(leaves))

    def _own(self, leaf: Any, recorder: Recorder) -> Any:
        """A result that was made without the graph (a constant) gets a tensor of its own at every call."""
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla" or _C.has_graph(leaf):
            return leaf
        identity = _C.identity(leaf)[0]
        return leaf if identity in recorder.given or identity in recorder.captured else leaf.clone()

    @staticmethod
    def _result(leaf: Any, places: Mapping[int, int], given: Mapping[int, int]) -> Slot:
        if isinstance(leaf, torch.Tensor):
            identity = _C.identity(leaf)[0]
            if identity in places:
                return Slot("graph", places[identity])
            if identity in given:
                return Slot("argument", given[identity])
        return Slot("value", leaf)

    def is_current(self) -> bool:
        """Whether the captured tensors are still of the kind that the graph was traced for."""
        signature, pending, _ = _C.signature(self._captured)
        if pending:
            torch_xla.sync()
            signature = _C.signature(self._captured)[0]
        return bool(signature == self._signature)

    def run(self, leaves: Sequence[Any]) -> Any:
        outputs: list[torch.Tensor] = []
        if self._hash is not None:
            outputs = _host.run_graph(self._hash, self._inputs(leaves), self._seed)
        results = self._picked(outputs, leaves)
        if self._tokens is not None:
            return _C.unflatten(results, self._tokens)
        return pytree.tree_unflatten(results, self._structure)


@contextlib.contextmanager
def _host_reads_refused(function: str) -> Iterator[None]:
    """Turns the error of an execution inside of the trace into one that names the line."""
    try:
        yield
    except RuntimeError as error:
        if not _host.is_refused_execution(error):
            raise
        where = _errors.line_of(error)
        raise impure(
            function, where, "makes torch_xla run something, as a read on the host does", _RETURN_IT
        ) from error


def _refuse_gradients(function: str, results: Sequence[Any]) -> None:
    for leaf in results:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            raise _errors.DonationError(
                f"{function} is declared pure and returns {_leaves.array(leaf)} with a gradient history, which a "
                "replay does not have. Call backward() inside, or return .detach(), or use torch.no_grad(). "
                "Nothing was donated."
            )


class PureCompiled(Compiled):
    """Traces the function once for each signature, then runs the compiled graph on the arguments of each call."""

    def __init__(
        self,
        f: Callable[..., Any],
        arguments: Arguments,
        strict: bool | None,
        *,
        name: str | None = None,
        full_graph: bool = True,
        max_different_graphs: int | None = None,
    ) -> None:
        super().__init__(f, arguments, strict)
        self._graph_name = name or arguments.function
        self._limit = max_different_graphs
        self._programs: dict[Hashable, Program] = {}

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        with _host.graph_name(self._graph_name):
            return self._f(*args, **kwargs)

    def leaves(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Donated leaves first, then the others; static arguments have none."""
        return list(itertools.chain.from_iterable(found for found, _ in self._parts(plan, args, kwargs)))

    @staticmethod
    def _parts(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[list[Any], Hashable]]:
        return [_leaves.structure(_arguments.value(slot, args, kwargs)) for slot in plan.donated + plan.kept]

    def _run(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        parts = self._parts(plan, args, kwargs)
        leaves = list(itertools.chain.from_iterable(found for found, _ in parts))
        signature, pending, others = _C.signature(leaves)
        if pending:
            torch_xla.sync()
            signature, _, others = _C.signature(leaves)
        offer = _runs.Offer(Donated(self, plan, args, kwargs, parts), args, kwargs, where) if plan.donated else None
        try:
            key = (
                id(plan),
                *(structure for _, structure in parts),
                signature,
                offer.choice() if offer is not None else None,
                self._values(plan, others, args, kwargs),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                _host.autocast_state(),
                _host.shardings(leaves),
            )
            program = self._programs.get(key)
            if program is None or not program.is_current():
                self._refuse_others(leaves)
                positions = offer.positions(leaves) if offer is not None else ()
                program = self._trace_program(key, plan, args, kwargs, positions)
            if offer is None:
                return program.run(leaves)
            if program.returned:
                offer.keep_returned([leaves[i] for i in program.returned])
            with offer.consumed(program.pick_donors(leaves), program.name):
                result = program.run(leaves)
        except BaseException:
            if offer is not None:
                offer.cancel()
            raise
        offer.end()
        return result

    def _values(self, plan: Plan, others: Sequence[Any], args: Any, kwargs: Any) -> Hashable:
        """What is no tensor is a part of the program, as are static arguments; 1, 1.0 and True are told apart."""
        values = [*others, *(_arguments.value(slot, args, kwargs) for slot in plan.static)]
        for value in others:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{self.function} is declared pure, and a leaf of its arguments is of type "
                    f"{type(value).__name__}, which is no tensor and cannot be hashed. Register its class with "
                    "torch.utils._pytree, or pass something that has a hash."
                ) from None
        return tuple((type(value), value) for value in values)

    def _refuse_others(self, leaves: Sequence[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "xla":
                raise ValueError(
                    f"{self.function} is declared pure, and one of its arguments holds {_leaves.array(leaf)} on "
                    f"{leaf.device}: its value would become a constant of the graph. Move it with .to('xla')."
                )

    def _trace_program(self, key: Hashable, plan: Plan, args: Any, kwargs: Any, offered: Sequence[int]) -> Program:
        if self._limit is not None and key not in self._programs and len(self._programs) >= self._limit:
            raise RuntimeError(
                f"{self.function} would get more than max_different_graphs={self._limit} graphs; its arguments differ "
                "in structure, shape, dtype or value from those before."
            )
        program = self._programs[key] = Program(self, plan, args, kwargs, offered)
        return program
