"""Arrays without memory, for `lower`: single ones, and modules, optimizers and pytrees of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _host, _trees
from torch_xla_donate._errors import see

T = TypeVar("T")
Sharding = tuple[Any, Sequence[Any]]


def placeholder(shape: Sequence[int], dtype: torch.dtype, *, sharding: Sharding | None = None) -> torch.Tensor:
    """An XLA tensor without memory, for ``compile(...).lower``. Its value cannot be read.

    Args:
        shape: the sizes of the whole array.
        dtype: the torch dtype.
        sharding: ``(mesh, partition_spec)`` as for ``torch_xla.distributed.spmd.mark_sharding``. Needs SPMD.

    Raises:
        TypeError: shape is not a sequence of ints, dtype is not a torch dtype that XLA has, or sharding is not such a
            pair.
        ValueError: a size is negative, SPMD is off, or the sharding does not fit the shape.
    """
    try:
        sizes = tuple(torch.Size(shape))
    except (TypeError, OverflowError):
        raise TypeError(f"placeholder got shape={shape!r}. Give a sequence of ints. {see('ahead')}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"placeholder got shape={sizes}. Give sizes of 0 or more. {see('ahead')}")
    return _empty(sizes, dtype, None if sharding is None else _op_sharding(sizes, sharding))


def placeholder_like(tree: T, *, sharding: Callable[[str, torch.Tensor], Sharding | None] | None = None) -> T:
    """A copy of a tensor, a module, an optimizer or a pytree of them, with placeholders instead of the tensors.

    It replaces tensor leaves, the parameters and buffers of modules, and their gradients. Tensors in other attributes
    of a module stay. The tensors may be on any device, also on ``meta``. Tensors that are one object, or that share an
    XLA buffer, stay so. A copied optimizer updates the copied parameters. CPU scalars in the state of an optimizer,
    such as its step counts, keep their values.

    Args:
        tree: what to copy. Other leaves are copied as they are.
        sharding: called with the name of each tensor (as in ``named_parameters``) and the tensor. It returns ``(mesh,
            partition_spec)``, or None to replicate the array. Without it, sharded XLA tensors keep their shardings.
            The state of an optimizer gets the sharding of its parameter, if their shapes are equal.

    Raises:
        TypeError, ValueError: as for `placeholder`. TypeError also for a lazy parameter, a nested or a sparse tensor.
    """
    made = Placeholders()
    leaves, names = _trees.flatten(tree, "tree")
    shardings: dict[int, Any] = {}

    def add(leaf: torch.Tensor, found: Any) -> None:
        shardings[id(leaf)] = found
        new = made(leaf, found)
        if leaf.is_leaf and leaf.grad is not None:
            new.grad = made(leaf.grad, found)

    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in made.by_id:
            _check_dense(leaf, names.name(number))
            given = sharding(names.name(number), leaf) if sharding is not None else None
            add(leaf, _op_sharding(tuple(leaf.shape), given) if given is not None else _kept(leaf, sharding))
    for optimizer in pytree.tree_leaves(tree):
        if isinstance(optimizer, torch.optim.Optimizer):
            for parameter, state in optimizer.state.items():
                for leaf in state.values():
                    if isinstance(leaf, torch.Tensor) and id(leaf) not in made.by_id and not _is_counter(leaf):
                        add(leaf, shardings.get(id(parameter)) if leaf.shape == parameter.shape else None)
    return copy.deepcopy(tree, made.by_id)


class Placeholders:
    """Makes placeholders for tensors. Tensors that share a buffer get placeholders that share one."""

    def __init__(self) -> None:
        self.by_id: dict[int, torch.Tensor] = {}
        self._by_buffer: dict[int, tuple[int, torch.Tensor]] = {}

    def __call__(self, leaf: torch.Tensor, op_sharding: Any) -> torch.Tensor:
        if id(leaf) not in self.by_id:
            self.by_id[id(leaf)] = self._make(leaf, op_sharding)
        return self.by_id[id(leaf)]

    def _make(self, leaf: torch.Tensor, op_sharding: Any) -> torch.Tensor:
        identity, buffer = _C.identity(leaf) if leaf.device.type == "xla" else (0, 0)
        known = self._by_buffer.get(buffer)
        if known is None:
            empty = _empty(leaf.shape, leaf.dtype, op_sharding)
            if buffer:
                self._by_buffer[buffer] = (identity, empty.detach())
        else:
            empty = known[1].detach() if known[0] == identity else _host.tensor_of_array(known[1], known[1].dtype, None)
        if isinstance(leaf, torch.nn.Parameter):
            return torch.nn.Parameter(empty, leaf.requires_grad)
        return empty.requires_grad_(leaf.requires_grad)


def is_materialised(leaf: Any) -> bool:
    """Whether an object is an XLA tensor that holds an array, or is a placeholder of one."""
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "xla" and _C.identity(leaf)[1] != 0


def _empty(sizes: Sequence[int], dtype: torch.dtype, op_sharding: Any) -> torch.Tensor:
    try:
        return _host.placeholder(sizes, dtype, op_sharding)
    except KeyError:  # torch_xla's table of types
        raise TypeError(
            f"a placeholder of dtype {dtype!r} cannot be made. Give a torch dtype that XLA has, such as torch.float32. "
            f"{see('ahead')}"
        ) from None


def _check_dense(leaf: torch.Tensor, name: str) -> None:
    if torch.nn.parameter.is_lazy(leaf) or leaf.is_nested or leaf.layout != torch.strided:
        raise TypeError(
            f"{_trees.qualified_name('tree', name)} is of type {type(leaf).__name__} and is not a dense array. Call a "
            f"lazy module once before, and give nested and sparse tensors as dense ones. {see('ahead')}"
        )


def _is_counter(state: torch.Tensor) -> bool:
    return state.dim() == 0 and state.device.type == "cpu"


def _kept(leaf: torch.Tensor, sharding: object) -> Any:
    """The sharding that a sharded XLA tensor has, unless the caller gives all shardings."""
    return _host.op_sharding(leaf) if sharding is None and leaf.device.type == "xla" else None


def _op_sharding(sizes: tuple[int, ...], sharding: Sharding) -> Any:
    try:
        mesh, spec = sharding
        make, spec = mesh.get_op_sharding, tuple(spec)
    except (TypeError, ValueError, AttributeError):
        raise TypeError(
            f"a placeholder got sharding={sharding!r}. Give (mesh, partition_spec), as for "
            f"torch_xla.distributed.spmd.mark_sharding. {see('ahead')}"
        ) from None
    if not _host.runtime().is_spmd():
        raise ValueError(
            f"a placeholder got the sharding {spec}, but SPMD is off. Call torch_xla.runtime.use_spmd() before. "
            f"{see('ahead')}"
        )
    if len(spec) != len(sizes):
        raise ValueError(
            f"a placeholder of shape {sizes} got the sharding {spec}. Give a mesh axis or None for each of its "
            f"{len(sizes)} dimensions. {see('ahead')}"
        )
    try:
        return make(spec)
    except (AssertionError, ValueError, KeyError) as error:
        raise ValueError(
            f"a placeholder of shape {sizes} got the sharding {spec}, which the mesh of axes {mesh.axis_names} "
            f"refuses: {error}. Give axes of the mesh. {see('ahead')}"
        ) from error
