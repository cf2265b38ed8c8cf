"""What is donated: the tensors of an argument, in order, and the name of each."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _C


class Names(Protocol):
    """Gives leaf ``index`` its name. Holds no tensor: a mark must not keep memory alive."""

    def name(self, index: int) -> str: ...


class Single:
    """A tensor that was given by itself has no name; the donation's file and line tell which it is."""

    def name(self, index: int) -> str:
        return ""


class Positions:
    """The items of a list or tuple."""

    def name(self, index: int) -> str:
        return f"[{index}]"


class Listed:
    """Names that were known from the start."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def name(self, index: int) -> str:
        return self._names[index]


class Paths:
    """The leaves of a pytree. Their paths are worked out when somebody asks, from the structure alone."""

    def __init__(self, spec: pytree.TreeSpec) -> None:
        self._spec = spec
        self._names: list[str] | None = None

    def name(self, index: int) -> str:
        if self._names is None:
            numbered = pytree.tree_unflatten(range(self._spec.num_leaves), self._spec)
            paths, _ = pytree.tree_flatten_with_path(numbered)
            self._names = [pytree.keystr(path) for path, _ in paths]
        return self._names[index]


def same_structure(left: Names, right: Names) -> bool:
    """Whether two pytrees have their leaves in the same places, in the same order."""
    return isinstance(left, Paths) and isinstance(right, Paths) and left._spec == right._spec


def flatten_module(module: torch.nn.Module) -> tuple[list[Any], Listed]:
    """Parameters and buffers. A tied tensor comes once for each of its names."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return [tensor for _, tensor in named], Listed([name for name, _ in named])


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[list[Any], Listed]:
    """Parameters and state. Counters that the optimizer keeps on the host (``step``) have no buffer to donate."""
    leaves: list[Any] = []
    names: list[str] = []
    number = 0  # as in optimizer.state_dict()
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            leaves.append(parameter)
            names.append(f"param_groups[{index}]['params'][{position}]")
            for key, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor) and state.device.type == "xla":
                    leaves.append(state)
                    names.append(f"state[{number}][{key!r}]")
            number += 1
    return leaves, Listed(names)


def _open(leaf: Any) -> tuple[list[Any], Listed] | None:
    """What a leaf that torch knows as a collection of tensors holds; None for any other leaf."""
    if isinstance(leaf, torch.nn.Module):
        return flatten_module(leaf)
    if isinstance(leaf, torch.optim.Optimizer):
        return flatten_optimizer(leaf)
    return None


_COLLECTIONS = (torch.nn.Module, torch.optim.Optimizer)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves that `flatten` gives, without their names."""
    return structure(tree)[0]


def structure(tree: Any) -> tuple[list[Any], Hashable]:
    """The leaves that `flatten` gives, and what tells the tree from trees of another structure.

    A pytree of a thousand leaves in small dictionaries takes torch 2 ms, which is longer than the rest of a call; so
    builtin containers are walked in C++.
    """
    plain = _C.flatten(tree)
    if plain is not None:
        return plain
    leaves, spec = pytree.tree_flatten(tree)
    if not any(isinstance(leaf, _COLLECTIONS) for leaf in leaves):
        return leaves, spec
    inside = tuple(_identity(leaf) for leaf in leaves if isinstance(leaf, _COLLECTIONS))
    expanded, names = flatten(tree)
    # The names, too: an optimizer has state only after its first step.
    return expanded, (spec, inside, tuple(names.name(i) for i in range(len(expanded))))


def _identity(collection: Any) -> Hashable:
    # An id would be that of another one once this one is gone.
    training = [m.training for m in collection.modules()] if isinstance(collection, torch.nn.Module) else []
    return weakref.ref(collection), tuple(training)


def flatten(tree: Any) -> tuple[list[Any], Names]:
    """All leaves of a tensor, a pytree, a module or an optimizer (also inside a pytree), and their names.

    ``None`` is kept as a leaf, so that positions stay those of the pytree; whoever uses the leaves skips it.
    """
    opened = _open(tree)
    if opened is not None:
        return opened
    leaves, spec = pytree.tree_flatten(tree)
    paths = Paths(spec)
    if not any(isinstance(leaf, _COLLECTIONS) for leaf in leaves):
        return leaves, Single() if spec.is_leaf() else paths
    expanded: list[Any] = []
    names: list[str] = []
    for index, leaf in enumerate(leaves):
        inside = _open(leaf)
        if inside is not None:
            inner, inner_names = inside
            names += [label(paths.name(index), inner_names.name(i), ".") for i in range(len(inner))]
            expanded += inner
        else:
            names.append(paths.name(index))
            expanded.append(leaf)
    return expanded, Listed(names)


def without_wrapper(leaf: Any) -> Any:
    """The tensor inside an XLAShardedTensor; anything else as it is."""
    return getattr(leaf, "global_tensor", leaf)


def elsewhere(leaves: Sequence[Any]) -> torch.Tensor | None:
    """The first tensor that is not on the XLA device; None if all are."""
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "xla"), None)


class Array(Protocol):
    """What has torch's shape and dtype: a tensor, or a record of one."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def array(tensor: Array) -> str:
    """``float32[8,4]``, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(str(size) for size in tensor.shape)}]"


def label(argument: str, name: str, joint: str | None = None) -> str:
    """How a message names a leaf: the argument, and the leaf's path in it.

    joint: what stands before a path that begins with neither bracket nor dot; by default it is put into brackets.
    """
    if not name or name.startswith(("[", ".")):
        return f"{argument}{name}"
    return f"{argument} ({name})" if joint is None else f"{argument}{joint}{name}"
