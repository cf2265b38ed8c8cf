"""What is donated: the tensors of an argument, in order, and the name of each."""

from __future__ import annotations

import enum
import gc
import itertools
import types
import weakref
from collections import deque, namedtuple
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _C

Place = tuple[Hashable, ...]  # what leads to a leaf


class Names(Protocol):
    """Gives leaf ``index`` its name. Holds no tensor: a mark must not keep memory alive."""

    def name(self, index: int) -> str: ...


class Places(Names, Protocol):
    """Names are for people, and leaves whose keys print alike have the same one; their places differ."""

    def place(self, index: int) -> Place: ...


class Single:
    """A tensor that was given by itself has no name; the donation's file and line tell which it is."""

    def name(self, index: int) -> str:
        return ""

    def place(self, index: int) -> Place:
        return ()


class Positions:
    """The items of a list or tuple."""

    def name(self, index: int) -> str:
        return f"[{index}]"


class Listed:
    """Names that were known from the start.

    places: what tells the leaves apart; by default their names do.
    """

    def __init__(self, names: Sequence[str], places: Sequence[Place] | None = None) -> None:
        self._names = names
        self._places = places

    def name(self, index: int) -> str:
        return self._names[index]

    def place(self, index: int) -> Place:
        return self._places[index] if self._places is not None else (self._names[index],)


class _Key:
    """A dictionary's key that might hold tensors, or be one: its text and its hash stand for it."""

    def __init__(self, key: Hashable, number: int) -> None:
        self._hash = hash(key)
        self._text, is_whole = _text(key)
        self._name = self._text if is_whole else f"key {number}: {self._text}"

    def __str__(self) -> str:
        return f"[{self._name}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and (self._hash, self._text) == (other._hash, other._text)

    def __hash__(self) -> int:
        return self._hash


_PLAIN = {str, bytes, int, float, complex, bool, type(None)}
_KNOWN = (enum.Enum, torch.dtype, torch.device)


def _text(key: Any) -> tuple[str, bool]:
    """What names have for a key, and whether that is its repr. Not of any class: it may wait for a tensor, or fail."""
    if isinstance(key, torch.Tensor):
        return f"{type(key).__name__} {array(key)}", False
    if type(key) is tuple:
        items = [_text(item) for item in key]
        text, is_whole = ", ".join(text for text, _ in items), all(is_whole for _, is_whole in items)
        return f"({text}{',' if len(items) == 1 else ''})", is_whole
    is_known = type(key) in _PLAIN or isinstance(key, _KNOWN)
    return (repr(key), True) if is_known else (type(key).__name__, False)


class _Node(NamedTuple):
    """A container of a pytree.

    keys: of its children; texts with their brackets or dot, or `_Key`s. Where ``plain``, what stands in brackets.
    children: a `_Node` each, or None for a leaf.
    """

    keys: Sequence[Any]
    plain: bool
    children: Sequence[Any]

    def paths(self) -> Iterator[Place]:
        """The keys that lead to each leaf."""
        for key, child in zip(self.keys, self.children):
            step = f"[{key!r}]" if self.plain else key
            if child is None:
                yield (step,)
            else:
                for path in child.paths():
                    yield (step, *path)


def _node(tree: Any, leaves: list[Any]) -> _Node | None:
    """Flattens a pytree as torch does, and keeps its keys: torch's own spec would keep all that they hold."""
    kind = pytree._get_node_type(tree)
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is None:
        leaves.append(tree)
        return None
    children = [_node(child, leaves) for child in registered.flatten_fn(tree)[0]]
    keys, plain = _keys(kind, tree, len(children))
    return _Node(keys, plain, children)


def _keys(kind: Any, node: Any, count: int) -> tuple[Sequence[Any], bool]:
    """The keys of a container's children, and whether they are plain."""
    if kind in (list, tuple, deque):
        return range(count), True
    if kind in pytree.STANDARD_DICT_TYPES:
        keys = list(node)
        is_plain = _PLAIN.issuperset(map(type, keys))
        return (keys, True) if is_plain else (list(map(_step, keys, itertools.count())), False)
    if kind is namedtuple:
        return [f".{field}" for field in node._fields], False
    with_keys = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn
    entries = [entry for entry, _ in with_keys(node)[0]] if with_keys is not None else []
    if len(entries) != count:  # it has been registered without keys
        return range(count), True
    return [
        _step(entry.key, number) if isinstance(entry, pytree.MappingKey) else str(entry)
        for number, entry in enumerate(entries)
    ], False


def _step(key: Hashable, number: int) -> str | _Key:
    return f"[{key!r}]" if type(key) in _PLAIN else _Key(key, number)


class Paths:
    """The leaves of a pytree. Names are worked out when somebody asks, from the containers' keys alone."""

    def __init__(self, root: _Node) -> None:
        self._root = root
        self._places: list[Place] | None = None

    def place(self, index: int) -> Place:
        if self._places is None:
            self._places = list(self._root.paths())
        return self._places[index]

    def name(self, index: int) -> str:
        return "".join(map(str, self.place(index)))

    def is_like(self, other: Names) -> bool:
        """Whether another pytree has its leaves in the same places, in the same order."""
        return isinstance(other, Paths) and self._root == other._root


def has_keys(place: Place) -> bool:
    """Whether keys of dictionaries lead to a leaf. A number may as well be that of an item."""
    return any(isinstance(step, _Key) or "'" in str(step) for step in place)


def with_paths(tree: Any) -> tuple[list[Any], Paths | Single]:
    """The leaves that torch finds in a pytree, in its order, and their names; modules are leaves here."""
    leaves: list[Any] = []
    root = _node(tree, leaves)
    return leaves, Single() if root is None else Paths(root)


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
    return expanded, (spec, inside, tuple(names.place(i) for i in range(len(expanded))))


def _identity(collection: Any) -> Hashable:
    # An id would be that of another one once this one is gone.
    training = [m.training for m in collection.modules()] if isinstance(collection, torch.nn.Module) else []
    return weakref.ref(collection), tuple(training)


def flatten(tree: Any) -> tuple[list[Any], Places]:
    """All leaves of a tensor, a pytree, a module or an optimizer (also inside a pytree), and their names.

    ``None`` is kept as a leaf, so that positions stay those of the pytree; whoever uses the leaves skips it.
    """
    opened = _open(tree)
    if opened is not None:
        return opened
    leaves, paths = with_paths(tree)
    if not any(isinstance(leaf, _COLLECTIONS) for leaf in leaves):
        return leaves, paths
    expanded: list[Any] = []
    names: list[str] = []
    places: list[Place] = []
    for index, leaf in enumerate(leaves):
        inside = _open(leaf)
        if inside is not None:
            inner, inner_names = inside
            names += [label(paths.name(index), inner_names.name(i), ".") for i in range(len(inner))]
            places += [(*paths.place(index), *inner_names.place(i)) for i in range(len(inner))]
            expanded += inner
        else:
            names.append(paths.name(index))
            places.append(paths.place(index))
            expanded.append(leaf)
    return expanded, Listed(names, places)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors that a value leads to, however deep: in containers, modules, attributes, closures of functions.

    Runs no code of the objects. Pytrees would miss what is in objects of unregistered classes.
    """
    plain = _C.flatten(value)
    if plain is not None and all(_PLAIN.issuperset(map(type, keys)) for keys in plain[1] if type(keys) is tuple):
        return [leaf for leaf in plain[0] if isinstance(leaf, torch.Tensor)]
    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # keeps them alive, as long as their ids count
    todo = [value]
    while todo:
        item = todo.pop()
        if id(item) in seen or not gc.is_tracked(item) or isinstance(item, _NO_VALUES):
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            found.append(without_wrapper(item))
        elif isinstance(item, types.FunctionType):
            todo += [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        else:
            todo += gc.get_referents(item)
    return found


_NO_VALUES = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType)


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
