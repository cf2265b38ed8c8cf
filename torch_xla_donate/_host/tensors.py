"""Reads and makes XLA tensors and their buffers through torch_xla."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch_xla

from torch_xla_donate import _C, hlo
from torch_xla_donate._host.load import xlac
from torch_xla_donate._host.settings import runtime


def without_wrapper(leaf: Any) -> Any:
    """The tensor in an XLAShardedTensor, for functions of torch_xla; any other leaf unchanged. `_C` takes both."""
    return getattr(leaf, "global_tensor", leaf)


def sharding_spec(tensor: torch.Tensor) -> str:
    """The tensor's sharding in XLA's notation; empty if it has none."""
    return str(xlac()._get_xla_sharding_spec(without_wrapper(tensor)))


def shardings(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The shardings of the tensors among the arguments; empty without SPMD."""
    if not runtime().is_spmd():
        return ()
    tensors = [without_wrapper(a) for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "xla"]
    return (tuple(xlac()._get_xla_sharding_specs(tensors)),)


def same_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor of a materialised tensor's buffer."""
    _, found = xlac()._get_tensors_xla_device_data_node([without_wrapper(tensor)])
    return with_dtype(found[0], tensor.dtype)


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a trace in place of a materialised one. Under SPMD an alias, because another tensor of a
    placeholder's array would lose the sharding."""
    return tensor.detach() if runtime().is_spmd() else same_buffer(tensor)


def with_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this dtype with a materialised tensor's buffer, which may have another element type.

    torch_xla computes some int64 results, such as the indices of ``cummax``, as s32. What it makes from a buffer alone
    has the dtype that it chooses for the element type, such as int32 for u32.
    """
    if tensor.dtype == dtype:
        return tensor
    return tensor_of_array(tensor, dtype, op_sharding(tensor))


def tensor_of_array(source: torch.Tensor, dtype: torch.dtype, sharding: Any) -> torch.Tensor:
    """A tensor of this dtype and sharding with the array of another one."""
    # torch_xla shards only arrays with values, and pending tensors. So a pending one gets the array.
    tensor = torch.zeros(source.shape, dtype=dtype, device=source.device)
    if sharding is not None:
        xlac()._xla_mark_sharding(tensor, sharding)
    _C.give_array(tensor, source)
    return tensor


def computed(tensor: torch.Tensor) -> torch.Tensor:
    """A pending copy that will get a separate buffer. torch_xla may share the tensor's buffer with a plain clone."""
    copy = tensor.detach().clone()
    xlac()._xla_optimization_barrier_([copy])
    return copy


def tracked_views(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, wrapped so that a write through a view of it changes it.

    torch_xla wraps what it makes in the same way, but not inside of a TorchDispatchMode. There torch wraps the results
    of operations on wrapped tensors, so what a factory makes, and all that follows from it, has no wrapper.
    """
    if type(tensor) is not torch.Tensor or tensor.device.type != "xla" or torch._is_functional_tensor(tensor):
        return tensor
    wrapped: torch.Tensor = torch._to_functional_tensor(tensor)
    return wrapped


def tensor_id(tensor: torch.Tensor) -> int:
    """torch_xla's number of an XLA tensor. Numbers rise."""
    return int(xlac()._xla_get_tensor_id(without_wrapper(tensor)))


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that ``torch.func.grad``, ``vmap`` and the like have wrapped; any other tensor as it is."""
    functorch = torch._C._functorch
    while functorch.is_batchedtensor(tensor) or functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def give_own_buffer(tensor: torch.Tensor) -> None:
    """Gives a tensor that shares its buffer a separate one at the next step. Its value stays.

    It does not update the tensor in place: torch_xla would donate the shared buffer.
    """
    own = computed(tensor)
    torch_xla.sync()
    tensor.data.copy_(own)


def array_of(tensor: torch.Tensor) -> hlo.HloShape:
    """An XLA tensor's shape on its device."""
    shape = xlac()._xla_op_tensor_shape(without_wrapper(tensor), "")
    return hlo.HloShape(shape["type"], tuple(shape["sizes"]))


_FLOAT8 = {torch.float8_e5m2: "f8e5m2", torch.float8_e4m3fn: "f8e4m3fn"}


def placeholder(shape: Sequence[int], dtype: torch.dtype, sharding: Any = None) -> torch.Tensor:
    """An XLA tensor without memory. sharding: torch_xla's OpSharding, under SPMD."""
    from torch_xla.core import xla_builder

    # torch_xla's `create_placeholder_tensor` does the same, but does not know the float8 types.
    name = _FLOAT8.get(dtype) or xla_builder.Op.from_torch_type(dtype)  # type: ignore[no-untyped-call]
    array = xla_builder.mkshape(name, tuple(shape)).shape  # type: ignore[no-untyped-call]
    empty: torch.Tensor = xlac()._xla_create_placeholder_tensor(array)
    _C.note_placeholder(empty)
    return empty if sharding is None else tensor_of_array(empty, dtype, sharding)


def op_sharding(tensor: torch.Tensor) -> Any:
    """torch_xla's OpSharding of an XLA tensor; None if it has none."""
    return xlac()._get_xla_op_sharding(without_wrapper(tensor)) if sharding_spec(tensor) else None


def show_shardings(tensors: Iterable[torch.Tensor]) -> None:
    """Gives the nodes of sharded placeholders in this step's graph their shardings, as arrays with values have them."""
    if runtime().is_spmd():
        for tensor in tensors:
            if not _C.has_value(tensor):
                torch.neg(tensor.detach())  # makes the node
                sharding_spec(tensor)


def seed_buffer() -> int:
    """The buffer of the random seed that this step draws from.

    torch_xla finds the seed among a graph's inputs by an id, but removes the id if a scan draws random numbers.
    """
    ids, inputs = xlac()._get_tensors_xla_device_data_node([torch.rand(1, device="xla")])
    return int(_C.identity(inputs[ids.index(xlac()._get_seed_info_id())])[1])


def pending(values: Iterable[Any]) -> list[torch.Tensor]:
    """The pending tensors among some values, each once."""
    found: dict[int, torch.Tensor] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "xla" and _C.has_graph(value):
            found.setdefault(_C.identity(value)[0], without_wrapper(value))
    return list(found.values())


def forget_pending() -> None:
    """Drops all pending work on this device. A later read of such a tensor is an error of torch_xla."""
    xlac()._clear_pending_irs(str(torch_xla.device()))


def transfers() -> tuple[int, int]:
    """The number of reads of a tensor's value by this process, and of waits for a device by this thread."""
    data = xlac()._xla_metric_data("TransferFromDeviceTime")
    return int(data[0]) if data is not None else 0, _C.barriers_passed()
