"""torch.compile, and torch_xla's bridge to it."""

from __future__ import annotations

import dataclasses
import operator
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch_xla
from torch.nn.modules import module as modules

from torch_xla_donate import _C
from torch_xla_donate._host.load import xlac
from torch_xla_donate._host.repairs import TracedResults, copied_functions
from torch_xla_donate._host.switches import OrderedParameters, compiling, donor_flags


def compute_pending(arguments: Sequence[Any]) -> None:
    """Runs all pending work if a graph's argument is pending.

    torch_xla's bridge would run the arguments alone, later. A part of the pending work that updates a tensor in place
    overwrites the old value, which other pending work may still read.
    """
    tensors = [one for one in arguments if isinstance(one, torch.Tensor) and one.device.type == "xla"]
    if any(xlac()._check_tensor_need_materialization(tensors)):
        torch_xla.sync(wait=True, reset_scope=False)


class ExtractedGraph(NamedTuple):
    """A graph that torch_xla's dynamo bridge has compiled.

    run: runs the graph.
    parts: the number of parts in which it runs, on the device or on the host.
    returned: the places of the arguments whose buffers its results hold.
    places: for each donor its number among the graph's parameters, and that of the output computed from it.
    """

    run: Callable[..., Any]
    parts: int
    returned: frozenset[int]
    places: list[tuple[int | None, int | None]]


def extract_graph(
    model: torch.fx.GraphModule, arguments: Sequence[Any], donors: Sequence[torch.Tensor]
) -> ExtractedGraph:
    """Compiles a graph by torch_xla's dynamo bridge, with these arguments as its donors."""
    from torch_xla._dynamo import dynamo_bridge

    bridge = copied_functions(dynamo_bridge)
    original = bridge["extract_graph_helper"]
    parts = 0
    buffers: list[int] = []  # of the part's arguments
    place_of: dict[int, tuple[int | None, int | None]] = {}
    returned: set[int] = set()

    def extract_part(model: Any, cache: dict[Any, Any]) -> Any:
        """A run calls it again for another number that an operation on the host has computed."""
        nonlocal parts, buffers
        parts += 1
        with _C.Scope(compiling):
            torch_xla.sync(reset_scope=False)  # no pending work may run while the flags are set
            buffers = [_C.identity(tensor)[1] for tensor in model.xla_args if isinstance(tensor, torch.Tensor)]
            donated = donors if parts == 1 else []
            with OrderedParameters(donated) as parameters, donor_flags(donated):
                found = original(model, cache)
            _match_by_buffer(found[5], buffers, [buffer for buffer, _ in parameters.order])
            place_of.update((buffer, (place, output)) for place, (buffer, output) in enumerate(parameters.order))
            return _without_arguments(found, model, cache)

    class Returns:
        """In place of the bridge's class of this interface."""

        def __init__(self, inputs: Any, results: Any, updated: Sequence[bool], numbers: Any) -> None:
            self._results = TracedResults(inputs, buffers, results, updated)
            self._numbers = numbers  # sizes among the results, each with its place
            returned.update(buffers[place] for place in self._results.inputs())

        def addDumbReturn(self, inputs: Any, outputs: Any) -> Any:
            results = self._results.of_run(inputs, outputs)
            for place, number in self._numbers:
                results.insert(place, number)
            return results

    bridge["extract_graph_helper"], bridge["SpecialReturnHandler"] = extract_part, Returns
    # A constant of the graph may have the buffer of such an argument, and would follow the argument.
    arguments = [
        one.detach().clone() if isinstance(one, torch.Tensor) and _C.is_constant(one) else one for one in arguments
    ]
    torch_xla.sync(reset_scope=False)
    torch_xla.core.xla_model.wait_device_ops()
    given = [_C.identity(argument)[1] if isinstance(argument, torch.Tensor) else 0 for argument in arguments]
    identities = [_C.identity(donor)[1] for donor in donors]
    try:
        with _C.Scope(compiling):
            run = bridge["extract_compiled_graph"](model, tuple(arguments))
    finally:
        donors = []  # which extract_part would keep alive
    if isinstance(run, torch.fx.GraphModule):  # its nodes are compiled parts and operations on the host
        called = [node for node in run.graph.nodes if node.op.startswith("call_")]
        parts = max(parts, sum(node.target is not operator.getitem for node in called))
    return ExtractedGraph(
        run,
        parts,
        frozenset(place for place, buffer in enumerate(given) if buffer in returned),
        [place_of.get(buffer, (None, None)) for buffer in identities],
    )


def _match_by_buffer(matcher: Any, buffers: Sequence[int], order: Sequence[int]) -> None:
    """Corrects the bridge's list of inputs by the parameters of the compiled graph.

    The bridge looks for the tensor that first had a buffer. After a whole copy or a change of sharding that is not the
    argument, which the bridge then takes for a constant. It also lists unchanged results, which the graph does not
    read.

    order: the buffers of the graph's parameters.
    """
    position = {buffer: i for i, buffer in reversed(list(enumerate(buffers))) if buffer}
    ids, values, arguments = matcher.graph_input_tensor_ids, matcher.graph_input_xla_values, matcher.arg_idxs
    places: dict[int, int] = {}
    for place, value in enumerate(values):
        if value is not None and arguments[place] is None and _C.state(value) != "read_only":
            argument = position.get(_C.identity(value)[1])
            if argument is not None:
                arguments[place], values[place] = argument, None
        buffer = buffers[arguments[place]] if values[place] is None else _C.identity(values[place])[1]
        places.setdefault(buffer, place)
    assert places.keys() >= set(order), "the hooks have not seen the graph"
    read = [places[buffer] for buffer in order]
    matcher.graph_input_tensor_ids = [ids[place] for place in read]
    matcher.graph_input_xla_values = [values[place] for place in read]
    matcher.arg_idxs = [arguments[place] for place in read]


class _AnySharding:
    """Equal to every sharding.

    The bridge compares the shardings of its first calls with those of the extraction. If they differ, it extracts the
    graph again, without our donors. An unsharded argument always differs, because extraction makes it a replicated one.
    Callers have compared the shardings already.
    """

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _without_arguments(found: tuple[Any, ...], model: Any, cache: dict[Any, Any]) -> tuple[Any, ...]:
    """The result of the extraction without its tensors, which the bridge would keep and does not need."""
    kept = list(found)
    kept[0] = _AnySharding()
    kept[1], kept[7] = (None,) * len(found[1]), [None] * len(found[7])
    model.xla_args = None
    scrubbed = tuple(kept)
    for key, value in cache.items():
        if value is found:
            cache[key] = scrubbed
    return scrubbed


@dataclasses.dataclass(frozen=True)
class CapturedFrame:
    """The frame that torch.compile is compiling.

    Attributes:
        code: the code of the frame.
        returned: names of the graph's inputs that the frame returns unchanged.
        around: guard expressions for other values that the frame returns or stores without computing them.
    """

    code: types.CodeType
    returned: frozenset[str]
    around: tuple[str, ...]

    def values_around(self) -> list[Any]:
        """The values of the expressions in the nearest running frame of this code. May raise any exception."""
        if not self.around:
            return []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and not _is_version_of(frame.f_code, self.code):
            frame = frame.f_back
        if frame is None:
            raise LookupError(f"no frame of {self.code.co_name} is running")
        from torch._dynamo import guards

        scope = {**guards._get_closure_vars(), "L": _C.frame_variables(frame), "G": frame.f_globals}
        return [eval(expression, scope) for expression in self.around]


def _is_version_of(code: types.CodeType, original: types.CodeType) -> bool:
    """Whether torch.compile may have made the code from the original."""
    source = operator.attrgetter("co_filename", "co_firstlineno", "co_name")
    return bool(source(code) == source(original))


def captured_frame(inputs: Iterable[str]) -> CapturedFrame | None:
    """The frame that the running torch.compile backend captures; None if it is unknown.

    The outputs of a graph do not include a value that the frame returns unchanged. Bytecode around the graph returns
    it. `inputs` has the names of the graph's inputs, which do not include arguments that the graph does not read.
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.base import AttributeMutationNew, VariableTracker

    def is_new_object(variable: Any) -> bool:
        """Whether the frame makes it: it has no value yet. The visit comes to its attributes."""
        made = isinstance(variable.mutation_type, AttributeMutationNew)
        return made and not isinstance(variable, TensorVariable)

    read = set(inputs)
    frame = sys._getframe(1)
    while frame.f_back is not None:
        owner: Any = _C.frame_variables(frame).get("self")
        if type(owner).__name__ == "OutputGraph":
            returned: set[str] = set()
            around: dict[str, None] = {}

            def note(variable: Any, returned: set[str] = returned, around: dict[str, None] = around) -> None:
                # vars(), because getattr() on a lazy variable would add it to the graph.
                node = getattr(vars(variable).get("proxy"), "node", None)
                if node is not None and node.op == "placeholder" and node.name in read:
                    returned.add(node.name)
                elif variable.source is not None and not is_new_object(variable):
                    around[variable.source.name()] = None

            try:
                VariableTracker.visit(note, owner.root_tx.stack)
                VariableTracker.visit(note, owner.side_effects.store_attr_mutations)
                return CapturedFrame(owner.root_tx.f_code, frozenset(returned), tuple(around))
            except (AttributeError, NotImplementedError):
                return None
        frame = frame.f_back
    return None


def wrapping_code() -> types.CodeType:
    """The code of torch.compile's wrapper around a callable that has no frame or belongs to torch."""
    from torch._dynamo.external_utils import wrap_inline

    return wrap_inline(len).__code__


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    return bool(
        type(module).__call__ is not torch.nn.Module.__call__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or modules._has_any_global_hook()  # type: ignore[no-untyped-call]
    )
