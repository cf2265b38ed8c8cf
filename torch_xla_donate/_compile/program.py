"""A traced function: its compiled graph, and the sources of inputs and results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch_xla
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _host, _marks, _numbers, _trace, _trees
from torch_xla_donate._compile.arguments import CallArguments
from torch_xla_donate._compile.base import HARMLESS
from torch_xla_donate._compile.donation import RunDonation, signature_of
from torch_xla_donate._compile.floats import upload_floats
from torch_xla_donate._compile.proxies import ArgumentProxies, refuse_composed, tensors_among
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._host import interrupts

# Of graphs that were compiled outside a step, for their names in the report.
_graph_numbers = itertools.count(1)

# The number of the output of the graph that is the result, or what makes the result from outputs and leaves.
Result = int | Callable[[Sequence[torch.Tensor], Sequence[Any]], Any]


class TracedGraph:
    """The compiled graph of a trace, and the sources of its inputs and results.

    Attributes:
        name: its name in the report.
        returned: the positions of the leaves whose buffers its results hold.
        donors: the positions of the leaves that its runs may consume.
        captured: the tensors from outside that the trace has used.
    """

    name: str
    returned: list[int]
    donors: list[int]
    captured: list[torch.Tensor]
    _retyped: list[int] | None = None  # the outputs that a run gives another dtype; None before the first run

    def _compile(
        self,
        results: Sequence[Any],
        leaves: Sequence[Any],
        offered: Sequence[int],
        captured: Mapping[int, torch.Tensor],
        floats: Mapping[int, int],
        seed_buffer: int | None = None,
    ) -> _host.CompiledGraph:
        """Compiles the graph of a trace's results. Comes inside of the trace, and `_connect` after it.

        captured: the tensors from outside, by identity.
        floats: the position among the leaves of the float that a tensor stands for, by the tensor's id.
        """
        self.name, self.captured = f"run-{next(_graph_numbers)}", list(captured.values())
        outputs = _host.pending(leaf for leaf in results if id(leaf) not in floats)
        self._dtypes = [leaf.dtype for leaf in outputs]
        places = {_C.identity(leaf)[0]: place for place, leaf in enumerate(outputs)}
        tensors = tensors_among(leaves)
        given = {_C.identity(leaf)[0]: i for i, leaf in reversed(tensors)}
        self._results = [
            _argument(floats[id(leaf)]) if id(leaf) in floats else self._result(leaf, places, given, leaves, captured)
            for leaf in results
        ]
        # By buffer, since several arguments may hold one. The signature says which of them do.
        kept = {_C.identity(tensor)[1] for tensor in _trees.tensors_in(results)} - {0}
        self.returned = [i for i, leaf in tensors if _C.identity(leaf)[1] in kept]
        self.donors = [i for i in offered if i not in self.returned]
        return _host.compile_graph(outputs, [leaves[i] for i in self.donors], seed_buffer)

    def _connect(
        self,
        graph: _host.CompiledGraph,
        trace: _host.Tracing,
        leaves: Sequence[Any],
        floats: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Finds the source of each input of the graph. Returns a tensor from outside that the trace has not seen."""
        self._hash, self._seeds = graph.hash, _host.seeds_of(graph, trace.seed)
        buffers = [_C.identity(tensor)[1] for tensor in graph.inputs]
        captured = {_C.identity(tensor)[1]: tensor for tensor in self.captured}
        given = {_C.identity(leaf)[1]: i for i, leaf in reversed(tensors_among(leaves))}
        uploaded = 0 if floats is None else _C.identity(floats)[1]
        self._floats = buffers.index(uploaded) if uploaded in buffers else None
        # The source of each input: a leaf of the call, or, numbered from -1 down, a tensor that is always the same.
        self._sources: list[int] = []
        self._same: list[torch.Tensor] = []
        # For each leaf its number among the graph's parameters, and that of the output computed from it.
        self._places: dict[int, tuple[int, int | None]] = {}
        unseen = None
        for place, (buffer, tensor) in enumerate(zip(buffers, graph.inputs)):
            if buffer in given and buffer not in captured:
                self._sources.append(given[buffer])
                self._places[given[buffer]] = (place, graph.preferred_outputs[place])
            else:
                if 0 <= graph.ids[place] < trace.first_id and buffer not in captured and buffer != uploaded:
                    unseen = tensor
                self._same.insert(0, captured.get(buffer, tensor))
                self._sources.append(-len(self._same))
        self._usable = self._places.keys() - set(self.returned)
        self.donors = [i for i in self.donors if i in self._places]
        return unseen

    @staticmethod
    def _result(
        leaf: Any,
        places: Mapping[int, int],
        given: Mapping[int, int],
        leaves: Sequence[Any],
        captured: Mapping[int, torch.Tensor],
    ) -> Result:
        if not isinstance(leaf, torch.Tensor):
            return lambda outputs, now: leaf
        identity = _C.identity(leaf)[0] if leaf.device.type == "xla" else 0
        kind, requires_grad = type(leaf), leaf.requires_grad

        def like(result: torch.Tensor) -> torch.Tensor:
            if kind is not torch.Tensor:
                return torch.Tensor._make_subclass(kind, result, requires_grad)
            return result.requires_grad_() if requires_grad else result

        if identity in places:
            output = places[identity]
            return (lambda outputs, now: like(outputs[output])) if kind is not torch.Tensor or requires_grad else output
        if identity in given:
            argument = given[identity]
            if leaf is leaves[argument]:
                return _argument(argument)
            return lambda outputs, now: like(now[argument].detach())
        known = captured.get(identity)
        if known is None:
            return lambda outputs, now: leaf.clone()
        if leaf is known:
            return lambda outputs, now: known
        return lambda outputs, now: like(known.detach())

    def consumed(self, donation: RunDonation, leaves: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """A context in which a run consumes what it may of the leaves of a call."""
        donors = self.donors or [i for i in donation.undonated(leaves) if i in self._usable]
        places = [self._places[i] for i in donors]
        return donation.consumed([leaves[i] for i in donors], self.name, places, bool(self.donors))

    def run_graph(self, leaves: Sequence[Any]) -> list[Any]:
        """The results of a run on the leaves of a call, in the order of the trace's results."""
        sources = [*leaves, *self._same]
        inputs = [sources[i] for i in self._sources]
        if self._floats is not None:
            inputs[self._floats] = upload_floats(leaves)
        outputs = _host.run_graph(self._hash, inputs, self._seeds) if self._hash is not None else []
        if self._retyped is None:
            self._retyped = [i for i, output in enumerate(outputs) if output.dtype != self._dtypes[i]]
        for i in self._retyped:
            outputs[i] = _host.with_dtype(outputs[i], self._dtypes[i])
        return [outputs[make] if isinstance(make, int) else make(outputs, leaves) for make in self._results]


class TracedProgram(TracedGraph):
    """A traced function.

    function: its name in messages.
    offered: the positions of the leaves that the graph may consume.

    Attributes:
        replay: what begins later calls whose arguments are like those of the trace; None if nothing does.
    """

    replay: _C.Replay | None = None

    def __init__(self, f: Callable[..., Any], function: str, call: CallArguments, offered: Sequence[int]) -> None:
        refuse = _trace.Refusal(function)
        proxies = ArgumentProxies(function, call, refuse)
        if _host.in_dual_level():
            raise refuse(
                "is called inside forward_ad.dual_level(), and a replay computes no tangents", "Call it outside", ""
            )
        while self._trace_once(f, function, proxies, refuse, offered):
            proxies.separate()
        proxies.refuse_kept(self._opaque)

    def _trace_once(
        self,
        f: Callable[..., Any],
        function: str,
        proxies: ArgumentProxies,
        refuse: _trace.Refusal,
        offered: Sequence[int],
    ) -> bool:
        """Returns True if an argument shares its buffer with another input, which the graph cannot distinguish."""
        trace = _host.Tracing()
        with trace:
            call, leaves = proxies.make()
            recorder = _trace.Recorder(refuse, leaves)
            recorder.inseparable, recorder.donated_copies = proxies.inseparable(), proxies.donated_copies
            recorder.first_id = trace.first_id
            with _trace.Restoring(recorder), _marks.inside_call.replaced(True):
                refused, watched = _trace.host_reads_refused(refuse), _trace.current_watcher.replaced(recorder)
                with interrupts.Restored(), refused, recorder.modules, recorder.reads, recorder, watched:
                    tree = f(*call.args, **call.kwargs)
                    try:
                        results, self._structure = pytree.tree_flatten(tree)
                    except RecursionError:
                        raise _trees.refuse_depth(f"the result of {function}") from None
                    self._opaque = next((type(leaf).__name__ for leaf in results if not isinstance(leaf, HARMLESS)), "")
                    plain = _C.flatten(tree)
                    self._tokens = None if plain is None else plain[1]
                    del tree
                proxies.refuse_changed()
                recorder.reads.check()
                refuse_composed(function, "it returns", results)
                _refuse_gradients(function, results, recorder)
                recorder.note_returned(results)
                recorder.check()
                floats = proxies.floats  # a float that the function returns unchanged is the call's float
                outside = recorder.given | recorder.captured.keys()
                own = [
                    leaf if id(leaf) in floats else own_result(_numbers.as_result(leaf), outside) for leaf in results
                ]
                _refuse_other_devices(function, [*_host.pending(own), *recorder.captured.values()])
                proxies.note_made(recorder.made)
                if proxies.are_shared(recorder.captured.values(), leaves):
                    return True
                graph = self._compile(own, leaves, offered, recorder.captured, floats, recorder.seed_buffer)
        self._without_gradient = [one for one in self.captured if id(one) in recorder.without_gradient]
        self._leaves_without_gradient = [i for i, leaf in enumerate(leaves) if id(leaf) in recorder.without_gradient]
        self._signature = self._sign()
        self._aliases = recorder.aliases
        self._modules, self._global_hooks = recorder.modules.found, recorder.modules.global_hooks
        unseen = self._connect(graph, trace, leaves, proxies.values)
        if unseen is None:
            unseen = proxies.read_unseen(recorder.captured)
        if unseen is not None:
            raise refuse(
                f"uses {_trees.dtype_and_shape(unseen)} from outside where the trace does not see it, such as in a "
                "hook, a custom backward pass or a custom operation",
                "Use an argument of the function there",
                "",
            )
        return False

    def run(self, leaves: Sequence[Any]) -> Any:
        results = self.run_graph(leaves)
        if self._tokens is not None:  # the same in C++
            return _C.unflatten(results, self._tokens)
        return pytree.tree_unflatten(results, self._structure)

    def _sign(self) -> tuple[Hashable, bool]:
        found = signature_of(self.captured)
        return (found.key, *map(_trees.same, found.hooks), _host.shardings(self.captured)), found.pending

    def is_current(self, leaves: Sequence[Any]) -> bool:
        """Whether the graph still fits the tensors that the function closes over, and the state of its modules.

        leaves: those of the call, whose gradients the function may have asked for.
        """
        if any(leaves[i].grad is not None for i in self._leaves_without_gradient):
            return False
        if self.captured:
            signature, pending = self._sign()
            if pending:
                torch_xla.sync()
                signature, _ = self._sign()
            if signature != self._signature[0] or any(one.grad is not None for one in self._without_gradient):
                return False
        for pair in self._aliases:  # until one of them is given other data
            one, other = (reference() for reference in pair)
            if one is not None and other is not None and _C.identity(one)[0] != _C.identity(other)[0]:
                return False
        if self._modules and _host.global_hooks() != self._global_hooks:
            return False
        for reference, state in self._modules:
            module = reference()
            if module is not None and _trace.state_of(module) != state:
                return False
        return True

    def set_replay(
        self, structures: Sequence[Hashable], signature: _C.Signature, donated: Sequence[Any], names: _trees.Places
    ) -> None:
        """Sets `replay` from the call that was traced, unless the general way has to look at each call.

        donated: the leaves of donated arguments, which come first.
        """
        tensors = [i for i, leaf in enumerate(donated) if isinstance(leaf, torch.Tensor)]
        is_whole = bool(tensors) and self.donors == tensors and not (self.captured or self.returned)
        # A gradient hook may refer to the function, and the garbage collector does not see what C++ holds.
        is_whole = is_whole and not (self._leaves_without_gradient or signature.hooks)
        if is_whole and signature.distinct and not _host.runtime().is_spmd():  # which compares shardings, too
            donors = [(i, *self._places[i]) for i in self.donors]
            self.replay = _C.Replay(list(structures), signature, donors, self.name, names)


def own_result(leaf: Any, outside: Container[int]) -> Any:
    """A result; if no operation made it, such as a constant or a whole copy, an output of the graph with its value.

    outside: the identities of the tensors that were not made in the trace.
    """
    leaf = _host.without_wrapper(leaf)
    if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla" or _C.has_graph(leaf):
        return leaf
    return leaf if _C.identity(leaf)[0] in outside else _host.computed(leaf)


def _argument(number: int) -> Result:
    return lambda outputs, leaves: leaves[number]


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
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None and id(leaf) not in recorder.outside_ids:
            raise DonationError(
                f"{function} is declared pure, but returns {_trees.dtype_and_shape(leaf)} with a gradient history, "
                "which a replay does not have. Call backward() inside, return .detach(), or use torch.no_grad(). "
                f"Nothing was donated. {see('pure')}"
            )
