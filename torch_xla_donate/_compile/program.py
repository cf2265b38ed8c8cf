"""A traced function: its compiled graph, and the sources of inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch_xla
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _host, _numbers, _trace, _trees
from torch_xla_donate._compile import log
from torch_xla_donate._compile.arguments import CallArguments
from torch_xla_donate._compile.floats import upload_floats
from torch_xla_donate._compile.proxies import ArgumentProxies
from torch_xla_donate._compile.run_donation import new_graph_name
from torch_xla_donate._compile.signatures import signature_of
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._host import interrupts

if TYPE_CHECKING:
    from torch_xla_donate._compile.pure import PureCompiled


# Results of these types hide no tensors.
_PLAIN = (torch.Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class ValueSource(NamedTuple):
    """The source of a result, or of an input of the graph."""

    kind: str  # "graph", "argument", "detached argument", "value", "detached value", "copied value" or "floats"
    source: Any
    like: Any = None  # Parameter or requires_grad, of a result that is one


class TracedProgram:
    """A traced function: its compiled graph, and the sources of inputs and results."""

    def __init__(self, compiled: PureCompiled, call: CallArguments, offered: Sequence[int]) -> None:
        self.name = new_graph_name()
        proxies = ArgumentProxies(compiled.function, call)
        while self._trace_once(compiled, proxies, offered):
            proxies.separate()
        proxies.refuse_kept(self._opaque)

    def _trace_once(self, compiled: PureCompiled, proxies: ArgumentProxies, offered: Sequence[int]) -> bool:
        """Returns True if an argument shares its buffer with another input, which the graph cannot distinguish."""
        with _host.tracing():
            call, leaves = proxies.make()
            recorder = _trace.Recorder(compiled.function, leaves)
            recorder.inseparable = proxies.inseparable()
            with _trace.Restoring(recorder):
                reads = recorder.reads
                watched = _trace.watched(recorder)
                refused = _trace.host_reads_refused(compiled.function)
                with interrupts.Restored(), refused, recorder.modules, reads, recorder, watched:
                    tree = compiled.trace(*call.args, **call.kwargs)
                    try:
                        results, self._structure = pytree.tree_flatten(tree)
                    except RecursionError:
                        raise _trees.refuse_depth(f"the result of {compiled.function}") from None
                    self._opaque = next((type(leaf).__name__ for leaf in results if not isinstance(leaf, _PLAIN)), "")
                    plain = _C.flatten(tree)
                    self._tokens = None if plain is None else plain[1]
                    del tree
                proxies.refuse_changed()
                reads.check()
                _refuse_gradients(compiled.function, results, recorder)
                recorder.note_returned(results)
                recorder.check()
                floats = proxies.floats  # a float that the function returns unchanged is the call's float
                own = [
                    leaf if id(leaf) in floats else self._own(_numbers.as_result(leaf), recorder) for leaf in results
                ]
                outputs = _host.pending(leaf for leaf in own if id(leaf) not in floats)
                _refuse_other_devices(compiled.function, [*outputs, *recorder.captured.values()])
                places = {_C.identity(leaf)[0]: place for place, leaf in enumerate(outputs)}
                tensors = [(i, leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
                given = {_C.identity(leaf)[0]: i for i, leaf in reversed(tensors)}
                proxies.note_made(recorder.made)
                if proxies.are_shared(recorder.captured.values(), leaves):
                    return True
                self._results = [
                    ValueSource("argument", floats[id(leaf)])
                    if id(leaf) in floats
                    else self._result(leaf, places, given, leaves, recorder)
                    for leaf in own
                ]
                # By buffer, since several arguments may hold one. The signature says which of them do.
                kept = {_C.identity(tensor)[1] for tensor in _trees.tensors_in(own)} - {0}
                self.returned = [i for i, leaf in tensors if _C.identity(leaf)[1] in kept]
                donors = [i for i in offered if i not in self.returned]
                given_up = [leaves[i] for i in donors]
                log.dump_lowered(compiled.function, lambda: _host.hlo_text(outputs, given_up)[0])
                graph = _host.compile_graph(outputs, given_up, recorder.seed_buffer)
        self.captured = list(recorder.captured.values())
        self._signature = self._sign()
        self._modules = recorder.modules.found
        self._connect(graph, tensors, proxies.values)
        self.donors = [i for i in donors if i in self._places]
        return False

    def _connect(
        self, graph: _host.CompiledGraph, arguments: Sequence[tuple[int, torch.Tensor]], floats: torch.Tensor | None
    ) -> None:
        """Finds the source of each input of the graph."""
        self._hash, self._seed = graph.hash, graph.seeds[0] if graph.seeds else None
        by_buffer: dict[int, ValueSource] = {}
        if floats is not None:
            by_buffer[_C.identity(floats)[1]] = ValueSource("floats", None)
        for tensor in self.captured:
            by_buffer[_C.identity(tensor)[1]] = ValueSource("value", tensor)
        for i, leaf in arguments:
            by_buffer.setdefault(_C.identity(leaf)[1], ValueSource("argument", i))
        sources = [by_buffer.get(_C.identity(tensor)[1], ValueSource("value", tensor)) for tensor in graph.inputs]
        self._inputs = [None if one.kind == "argument" else one.source for one in sources]
        self._floats = next((place for place, one in enumerate(sources) if one.kind == "floats"), None)
        self._arguments = [(place, one.source) for place, one in enumerate(sources) if one.kind == "argument"]
        self._places = {source: (place, graph.preferred_outputs[place]) for place, source in self._arguments}
        self._usable = self._places.keys() - set(self.returned)

    def _own(self, leaf: Any, recorder: _trace.Recorder) -> Any:
        """Makes a result an output of the graph if no operation made it, such as a constant or a whole copy."""
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla" or _C.has_graph(leaf):
            return leaf
        identity = _C.identity(leaf)[0]
        return leaf if identity in recorder.given or identity in recorder.captured else _host.computed(leaf)

    @staticmethod
    def _result(
        leaf: Any, places: Mapping[int, int], given: Mapping[int, int], leaves: Sequence[Any], recorder: _trace.Recorder
    ) -> ValueSource:
        if not isinstance(leaf, torch.Tensor):
            return ValueSource("value", leaf)
        identity = _C.identity(leaf)[0] if leaf.device.type == "xla" else 0
        like = torch.nn.Parameter if isinstance(leaf, torch.nn.Parameter) else True if leaf.requires_grad else None
        if identity in places:
            return ValueSource("graph", places[identity], like)
        if identity in given:
            same = leaf is leaves[given[identity]]
            return ValueSource("argument" if same else "detached argument", given[identity], None if same else like)
        known = recorder.captured.get(identity)
        if known is not None:
            return ValueSource("value" if leaf is known else "detached value", known, None if leaf is known else like)
        return ValueSource("copied value", leaf)

    def _sign(self) -> tuple[Hashable, bool]:
        found = signature_of(self.captured)
        return (found.key, _host.shardings(self.captured)), found.pending

    def is_current(self) -> bool:
        """Whether the graph still fits the tensors that the function closes over, and the modes of its modules."""
        if self.captured:
            signature, pending = self._sign()
            if pending:
                torch_xla.sync()
                signature, _ = self._sign()
            if signature != self._signature[0]:
                return False
        for reference, training in self._modules:
            module = reference()
            if module is not None and module.training != training:
                return False
        return True

    def usable(self, positions: Sequence[int]) -> list[int]:
        """The arguments that a run reads and does not return. The run may consume them."""
        return [i for i in positions if i in self._usable]

    def places(self, positions: Sequence[int]) -> list[tuple[int | None, int | None]]:
        """For each argument its number among the graph's parameters, and that of the output computed from it."""
        return [self._places[i] for i in positions]

    def run(self, leaves: Sequence[Any]) -> Any:
        inputs = list(self._inputs)
        for place, index in self._arguments:
            inputs[place] = leaves[index]
        if self._floats is not None:
            inputs[self._floats] = upload_floats(leaves)
        outputs = _host.run_graph(self._hash, inputs, self._seed) if self._hash is not None else []
        pick: dict[str, Callable[[Any], Any]] = {
            "graph": outputs.__getitem__,
            "argument": leaves.__getitem__,
            "detached argument": lambda index: leaves[index].detach(),
            "value": lambda value: value,
            "detached value": lambda value: value.detach(),
            "copied value": lambda value: value.clone(),
        }
        results = [
            pick[kind](source) if like is None else _like(pick[kind](source), like)
            for kind, source, like in self._results
        ]
        if self._tokens is not None:  # the same in C++
            return _C.unflatten(results, self._tokens)
        return pytree.tree_unflatten(results, self._structure)


def _like(result: torch.Tensor, like: Any) -> torch.Tensor:
    return result.requires_grad_() if like is True else torch.nn.Parameter(result)


def _refuse_other_devices(function: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError for a result, or a tensor from outside, that is not on the device on which the graph runs."""
    current = _host.current_device()
    other = next((tensor for tensor in tensors if str(tensor.device) != current), None)
    if other is not None:
        raise ValueError(
            f"{function} is declared pure and runs on {current}, but it computes or reads "
            f"{_trees.dtype_and_shape(other)} on {other.device}. Pass and close over tensors of one device. The device "
            f"of the arguments is the current one; without arguments, torch_xla.device(n) chooses it. {see('pure')}"
        )


def _refuse_gradients(function: str, results: Sequence[Any], recorder: _trace.Recorder) -> None:
    for leaf in results:
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and not recorder.is_outside(leaf):
            raise DonationError(
                f"{function} is declared pure, but returns {_trees.dtype_and_shape(leaf)} with a gradient history, "
                "which a replay does not have. Call backward() inside, return .detach(), or use torch.no_grad(). "
                f"Nothing was donated. {see('pure')}"
            )
