"""Repairs of defects of torch_xla's Python side. csrc/repairs has those of the C++ side.

`test_repairs.py` in `test/step/` and `test/process/` shows each defect in stock torch_xla. Once such a test fails with
each supported release, its repair can go. Numbers are those of pytorch/xla; in parentheses that of the change with
which the code came, because nobody has reported the defect.

| repair | defect | number | found in |
| --- | --- | --- | --- |
| `carried_in_order` | gradient_accumulation returns the carried tensors in another order | (#8608) | 2.8, 2.9 |
| `accumulation_by_buffer` | under SPMD each iteration gets the first slice if the step has a scan | (#8608) | 2.9 |
| `PURE_COPIES` | a whole copy in a graph of torch.compile writes into an argument | #7933 | 2.9 |
"""

from __future__ import annotations

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
    other tensors of them. torch_xla then takes the first slice for a constant, and every iteration gets it (2.9.0). The
    arguments that stand for carried tensors are other tensors, too.
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


def _copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return source.to(target.dtype).expand_as(target).clone()


def _all_copied(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *_: bool) -> list[torch.Tensor]:
    return [_copied(*pair) for pair in zip(targets, sources, strict=True)]


# How torch.compile traces a whole copy: it makes a new value. torch_xla's `aten.copy` and `aten._foreach_copy` write
# into the tensor that a functional graph passes as `self`, so the rest would be traced with another argument.
PURE_COPIES = {torch.ops.aten.copy.default: _copied, torch.ops.aten._foreach_copy.default: _all_copied}
