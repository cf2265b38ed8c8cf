"""Repairs of defects of torch_xla's Python side. csrc/repairs has those of the C++ side.

`test_repairs.py` in `test/step/` and `test/process/` shows each defect in stock torch_xla. Once such a test fails with
each supported release, its repair can go. Numbers are those of pytorch/xla; in parentheses that of the change with
which the code came, because nobody has reported the defect.

| repair | defect | number | found in |
| --- | --- | --- | --- |
| `carried_in_order` | gradient_accumulation returns the carried tensors in another order | (#8608) | 2.8, 2.9 |
| `accumulation_by_buffer` | under SPMD each iteration gets the first slice if the step has a scan | (#8608) | 2.9 |
| `with_pure_copies` | a whole copy in a graph of torch.compile writes into an argument | #7933 | 2.9 |
| `TracedResults` | torch.compile takes a value and its clone for one result; later ones shift | (#7902) | 2.8, 2.9 |
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla_donate import _C
from torch_xla_donate._host.load import xlac


def carried_in_order(host: types.ModuleType, carried: Sequence[Any]) -> list[Any]:
    """The carried tensors that torch_xla's gradient_accumulation returns, in the order in which they were passed.

    torch_xla computes the place of the k-th carried tensor with the wrong sign, which counts from the end.
    """
    is_wrong = "carried_tensors_start_idx - body_idx" in inspect.getsource(host._gradient_accumulation_impl)
    return [carried[-index] for index in range(len(carried))] if is_wrong else list(carried)


class _Instead:
    """A module with other values of some names."""

    def __init__(self, module: types.ModuleType, **values: Any) -> None:
        self._module = module
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def accumulation_by_buffer(host: types.ModuleType) -> Callable[..., Any]:
    """A copy of torch_xla's gradient_accumulation that finds the arguments in the traced step by their buffers.

    torch_xla finds them by the id of the tensor that last made a node of the buffer. Under SPMD the backward scan makes
    other tensors of them. torch_xla then takes the first slice for a constant, and every iteration gets it (2.9.0).
    """

    def data_nodes(results: Any, inputs: Any = ()) -> tuple[list[int], list[torch.Tensor]]:
        ids, tensors = xlac()._get_tensors_xla_device_data_node(results, inputs)
        known = {_C.identity(one)[1]: xlac()._xla_get_tensor_id(one) for one in inputs}
        return [known.get(_C.identity(one)[1], number) for number, one in zip(ids, tensors)], tensors

    names = copied_functions(host)
    names["torch_xla"] = _Instead(host.torch_xla, _XLAC=_Instead(xlac(), _get_tensors_xla_device_data_node=data_nodes))
    copied: Callable[..., Any] = names["gradient_accumulation"]
    return copied


def copied_functions(host: types.ModuleType) -> dict[str, Any]:
    """The names of a module. Its functions are copies that look up the names here, so that other threads, and later
    calls of the originals, do not see what changes."""
    names = {**vars(host)}
    for name, found in vars(host).items():
        if isinstance(found, types.FunctionType) and found.__globals__ is vars(host):
            names[name] = types.FunctionType(found.__code__, names, name, found.__defaults__, found.__closure__)
            names[name].__kwdefaults__ = found.__kwdefaults__
    return names


def with_pure_copies(model: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy of a functional graph in which a whole copy makes a new value.

    torch_xla's `aten.copy` and `aten._foreach_copy` write into the tensor that a functional graph passes as `self`,
    so the bridge would trace the rest of the graph with another argument.
    """
    aten = torch.ops.aten
    graph = copy.deepcopy(model.graph)

    def copied(target: torch.fx.Node, source: torch.fx.Node) -> torch.fx.Node:
        dtype = {"dtype": target.meta["val"].dtype}
        if source.meta["val"].dtype != dtype["dtype"]:
            source = graph.call_function(aten._to_copy.default, (source,), dtype)
        expanded = graph.call_function(aten.expand_as.default, (source, target))
        made = graph.call_function(aten.clone.default, (expanded,))
        made.meta["val"] = target.meta["val"]
        return made

    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        with graph.inserting_before(node):
            node.replace_all_uses_with(copied(*node.args[:2]))
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=aten._foreach_copy.default):
        with graph.inserting_before(node):
            values = [copied(target, source) for target, source in zip(*node.args[:2], strict=True)]
        for item in list(node.users):
            item.replace_all_uses_with(values[item.args[1]])
            graph.erase_node(item)
        graph.erase_node(node)
    return torch.fx.GraphModule(model, graph)


class TracedResults:
    """Where a run of a traced graph finds each result.

    torch_xla's executor computes an output for each tensor without a buffer, in the order of the results. Its bridge
    takes a value and its clone for one output, so that each later result would be the one before it.

    Args:
        inputs: the tensors that the graph was traced with, after the trace.
        buffers: their buffers before it.
        results: the results of the trace.
        updated: whether the graph updates the input in place.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        buffers: Sequence[int],
        results: Sequence[torch.Tensor],
        updated: Sequence[bool],
    ) -> None:
        objects = {id(tensor): place for place, tensor in enumerate(inputs) if not updated[place]}
        place_of = {buffer: place for place, buffer in reversed(list(enumerate(buffers))) if buffer}
        outputs: dict[int, int] = {}
        #: "output" and its place among the outputs; "input" and the place of the input that it is, "alias" or "copy"
        #: and that of the input whose buffer it holds; or "constant" and a tensor that torch_xla shares.
        self._sources: list[tuple[str, Any]] = []
        for result in results:
            data, buffer = _C.identity(result)
            if id(result) in objects:
                self._sources.append(("input", objects[id(result)]))
            elif buffer in place_of:
                place = place_of[buffer]
                self._sources.append(("copy" if updated[place] else "alias", place))
            elif buffer and _C.is_constant(result):
                self._sources.append(("constant", result))
            else:
                self._sources.append(("output", outputs.setdefault(data, len(outputs))))
        self._outputs = len(outputs)

    def inputs(self) -> set[int]:
        """The places of the inputs whose buffers or values are results."""
        return {place for kind, place in self._sources if kind in ("input", "alias", "copy")}

    def of_run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a run with these inputs and outputs."""
        assert len(outputs) == self._outputs, "torch_xla computes other outputs than those of the trace"
        return [_TAKE[kind](source, inputs, outputs) for kind, source in self._sources]


_TAKE: dict[str, Callable[[Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor]] = {
    "output": lambda place, inputs, outputs: outputs[place],
    "input": lambda place, inputs, outputs: inputs[place],
    "alias": lambda place, inputs, outputs: inputs[place].detach(),
    "copy": lambda place, inputs, outputs: inputs[place].clone(),
    "constant": lambda constant, inputs, outputs: constant.clone(),
}
