"""torch_xla's loops: scan, scan_layers and gradient_accumulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree

from torch_xla_donate import _C
from torch_xla_donate._errors import see
from torch_xla_donate._host.interrupts import Switched
from torch_xla_donate._host.load import xlac
from torch_xla_donate._host.repairs import accumulation_by_buffer, carried_in_order, copied_functions
from torch_xla_donate._host.settings import runtime
from torch_xla_donate._host.tensors import placeholder
from torch_xla_donate._locks import make_lock

# torch.fx patches torch.nn for the whole process while it traces, and fails if two threads trace at once. A scan holds
# the lock also while it is lowered: four scanning threads have stopped twice, and the cause is not known.
_scanning = make_lock()


def one_scan() -> Switched[bool]:
    """A context that one thread at a time is inside. It may enter again.

    Another thread waits without the GIL, and no scan holds a lock of a device. Inside, a backward pass runs on the
    thread itself: torch_xla traces a body with one, and autograd's thread of the device may be waiting to scan.
    """
    return Switched(torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled, False, _scanning)


def scan_layers(scan: Callable[..., Any], layers: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Calls a copy of torch_xla's scan_layers with another scan. Other threads may run the original."""
    from torch_xla.experimental import scan_layers as host

    names = copied_functions(host)
    names["scan"] = scan
    return names["scan_layers"](layers, *args, **options)


def is_traced(leaf: object) -> bool:
    """Whether a value represents a tensor in the trace of a scan's body, which AOTAutograd makes functional."""
    return isinstance(leaf, FunctionalTensor)


def read_by_backward_scan(node: Any) -> Sequence[Any]:
    """The tensors that the backward pass of a scan reads. node: the grad_fn of the scan's result.

    torch_xla saves the whole `init` and `xs` beside the activations, but reads only their sharding, and only under
    SPMD. The activations include the arrays of `xs` that the backward pass needs.
    """
    saved: Sequence[Any] = getattr(node, "saved_tensors", ())
    if runtime().is_spmd() or not hasattr(node, "_saved_tensors_spec"):
        return saved
    activations: Sequence[Any] = pytree.tree_unflatten(saved, node._saved_tensors_spec)["activations"]
    return activations


def accumulate(
    step: Callable[..., Any],
    iterable_tensors: tuple[torch.Tensor, ...],
    model: torch.nn.Module,
    carried_tensors: tuple[torch.Tensor, ...],
) -> Any:
    """Calls torch_xla's gradient_accumulation, and returns the carried tensors in their order.

    Raises ValueError if torch_xla's loop loses one of them, because the step does not read it.
    """
    from torch_xla.experimental import gradient_accumulation as host

    if _C.refuses_runs():  # inside `Tracing`
        iterable_tensors = tuple(map(_sliced_without_a_run, iterable_tensors))
    loop = accumulation_by_buffer(host)
    reads_refused = _C.refuse_reads(False)  # the loop syncs tensors without a value
    try:
        result = loop(step, iterable_tensors, model, *carried_tensors)
    finally:
        _C.refuse_reads(reads_refused)
    if not carried_tensors:
        return result
    loss, *carried = result
    carried = carried_in_order(host, carried)
    for index, tensor in enumerate(carried):
        if tensor is None:
            raise ValueError(
                f"carried_tensors[{index}] is not read by the train step, so torch_xla's loop loses its new value. "
                f"Use it in the step, or make it in the step and do not carry it. {see('gradient_accumulation')}"
            )
    return (loss, *carried)


class _Rows(torch.Tensor):
    """A tensor whose first row is a placeholder."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        return placeholder(self.shape[1:], self.dtype)


def _sliced_without_a_run(tensor: Any) -> Any:
    """The tensor for torch_xla's loop while a function is lowered, where nothing may run.

    torch_xla computes the first row before it traces the step. It reads only the row's shape, dtype and identity.
    """
    is_sliced = isinstance(tensor, torch.Tensor) and tensor.dim() > 0 and tensor.device.type == "xla"
    return tensor.as_subclass(_Rows) if is_sliced else tensor


def read(tensors: Sequence[torch.Tensor]) -> None:
    """Makes the nodes by which graphs read tensors."""
    xlac()._get_tensors_xla_device_data_node(list(tensors))
