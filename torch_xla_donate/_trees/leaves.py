"""Flattens arguments: tensors, pytrees, modules and optimizers."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _C
from torch_xla_donate._errors import see
from torch_xla_donate._trees.exact import exact, structure_key
from torch_xla_donate._trees.names import PLAIN, Place, Places, qualified_name, walk


def refuse_depth(name: object) -> RecursionError:
    """The error for a tree that pytrees cannot walk. name: its name in messages."""
    return RecursionError(
        f"{name} contains itself, or is nested deeper than Python's recursion limit of {sys.getrecursionlimit()} "
        "allows. Pass and return only the tensors, in a dict, list or tuple without such references. "
        f"{see('refused')}"
    )


def with_places(tree: Any) -> tuple[list[Any], list[Place]]:
    """The leaves of a pytree in torch's order, and their places. Modules are leaves."""
    leaves: list[Any] = []
    places: list[Place] = []
    walk(tree, (), leaves, places)
    return leaves, places


def flatten_optimizer(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[str]]:
    """Parameters and state on the device. Counters on the host (``step``) have no buffer to donate."""
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
    return leaves, names


def _open(leaf: Any) -> tuple[list[Any], list[str]] | None:
    """The tensors of a module or an optimizer; None for any other leaf."""
    if isinstance(leaf, torch.nn.Module):  # a tied tensor appears once for each of its names
        named = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers(remove_duplicate=False)]
        return [tensor for _, tensor in named], [name for name, _ in named]
    return flatten_optimizer(leaf) if isinstance(leaf, torch.optim.Optimizer) else None


_COLLECTIONS = (torch.nn.Module, torch.optim.Optimizer)


def flatten_fast(tree: Any, name: object) -> tuple[list[Any], Hashable]:
    """The leaves of `flatten`, and an exact key of the tree's structure.

    C++ walks builtin containers. torch takes 2 ms for a thousand leaves in small dictionaries, longer than the rest of
    a call.
    """
    try:
        plain = _C.flatten(tree, exact)
        if plain is not None:
            return plain
        leaves, spec = pytree.tree_flatten(tree)
        key = structure_key(spec)
    except RecursionError:
        raise refuse_depth(name) from None
    if not any(isinstance(leaf, _COLLECTIONS) for leaf in leaves):
        return leaves, key
    inside = tuple(_identity(leaf) for leaf in leaves if isinstance(leaf, _COLLECTIONS))
    expanded, names = flatten(tree, name)
    # The names belong to the key, because an optimizer has state only after its first step.
    return expanded, (key, inside, tuple(names.places))


def _identity(collection: Any) -> Hashable:
    # Not an id, because a later object may have the same one.
    training = [m.training for m in collection.modules()] if isinstance(collection, torch.nn.Module) else []
    return weakref.ref(collection), exact(training)


def flatten(tree: Any, name: object) -> tuple[list[Any], Places]:
    """All leaves of a tensor, a pytree, a module or an optimizer (also inside a pytree), and their names.

    ``None`` stays a leaf, so that positions are those of the pytree. Callers skip it.

    name: the name of the tree in messages.

    Raises RecursionError for a tree that contains itself, or is too deep.
    """
    try:
        leaves, places = with_places(tree)
    except RecursionError:
        raise refuse_depth(name) from None
    if not any(isinstance(leaf, _COLLECTIONS) for leaf in leaves):
        return leaves, Places(places)
    expanded: list[Any] = []
    inner: list[Place] = []
    for leaf, place in zip(leaves, places):
        opened = _open(leaf)
        if opened is None:
            expanded.append(leaf)
            inner.append(place)
        else:
            expanded += opened[0]
            inner += [(*place, qualified_name("", name, ".") if place else name) for name in opened[1]]
    return expanded, Places(inner)


def named_leaves(tree: Any, argument: str) -> list[tuple[str, Any]]:
    """The leaves of an argument except ``None``, each with its name in messages."""
    leaves, names = flatten(tree, argument)
    return [
        (qualified_name(argument, names.name(index)), leaf) for index, leaf in enumerate(leaves) if leaf is not None
    ]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors that a value refers to, in containers, modules, attributes and closures of any depth.

    Runs no code of the objects. A pytree would not enter objects of unregistered classes.
    """
    plain = _C.flatten(value)
    if plain is not None and all(PLAIN.issuperset(map(type, keys)) for keys in plain[1] if type(keys) is tuple):
        return [leaf for leaf in plain[0] if isinstance(leaf, torch.Tensor)]
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or not gc.is_tracked(item) or isinstance(item, _NO_VALUES):
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, types.FunctionType):
            todo += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        else:
            todo += gc.get_referents(item)
    return found


_NO_VALUES = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType)


def first_off_device(leaves: Sequence[Any]) -> torch.Tensor | None:
    """The first tensor that is not on the XLA device; None if all are."""
    return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.device.type != "xla"), None)
