"""Names of the leaves of an argument, for messages and reports."""

from __future__ import annotations

import enum
import itertools
from collections import deque, namedtuple
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

Place = tuple[Hashable, ...]  # the keys that lead to a leaf


class Names(Protocol):
    """Returns the name of leaf ``index``. Holds no tensor, because a mark must not keep memory alive."""

    def name(self, index: int) -> str: ...


class IndexNames:
    """The items of a list or tuple."""

    def name(self, index: int) -> str:
        return f"[{index}]"


class Places:
    """The names of some leaves by their places. Two leaves may have the same name, but not the same place."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places

    def name(self, index: int) -> str:
        return "".join(map(str, self.places[index]))


class _Key:
    """The text and the hash of a dictionary's key, instead of the key, which might hold tensors."""

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


PLAIN = {str, bytes, int, float, complex, bool, type(None)}
_KNOWN = (enum.Enum, torch.dtype, torch.device)


def _text(key: Any) -> tuple[str, bool]:
    """The text of a key, and whether it is the repr. The repr of an unknown class may fail, or wait for a tensor."""
    if isinstance(key, torch.Tensor):
        return f"{type(key).__name__} {dtype_and_shape(key)}", False
    if type(key) is tuple:
        items = [_text(item) for item in key]
        text, is_whole = ", ".join(text for text, _ in items), all(is_whole for _, is_whole in items)
        return f"({text}{',' if len(items) == 1 else ''})", is_whole
    is_known = type(key) in PLAIN or isinstance(key, _KNOWN)
    return (repr(key), True) if is_known else (type(key).__name__, False)


def walk(tree: Any, place: Place, leaves: list[Any], places: list[Place]) -> None:
    """Flattens a pytree as torch does, and keeps texts of its keys. torch's spec would keep the keys themselves."""
    kind = pytree._get_node_type(tree)
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is None:
        leaves.append(tree)
        places.append(place)
        return
    children = registered.flatten_fn(tree)[0]
    for step, child in zip(_steps(kind, tree, len(children)), children):
        walk(child, (*place, step), leaves, places)


def _steps(kind: Any, node: Any, count: int) -> list[Hashable]:
    """The texts of the keys of a container's children, with brackets or dot, or `_Key`s."""
    if kind in pytree.STANDARD_DICT_TYPES:
        return list(map(_step, node, itertools.count()))
    if kind is namedtuple:
        return [f".{field}" for field in node._fields]
    with_keys = pytree.SUPPORTED_NODES[kind].flatten_with_keys_fn if kind not in (list, tuple, deque) else None
    entries = [entry for entry, _ in with_keys(node)[0]] if with_keys is not None else []
    if len(entries) != count:  # a sequence, or registered without keys
        return [f"[{number}]" for number in range(count)]
    if getattr(with_keys, "__qualname__", "").startswith("register_dataclass."):
        # torch 2.8 gives the fields the keys of a mapping.
        entries = [pytree.GetAttrKey(entry.key) if isinstance(entry, pytree.MappingKey) else entry for entry in entries]
    return [
        _step(entry.key, number) if isinstance(entry, pytree.MappingKey) else str(entry)
        for number, entry in enumerate(entries)
    ]


def _step(key: Hashable, number: int) -> str | _Key:
    return f"[{key!r}]" if type(key) in PLAIN else _Key(key, number)


def has_keys(place: Place) -> bool:
    """Whether a dictionary's key leads to a leaf. A number may also be the index of an item."""
    return any(isinstance(step, _Key) or "'" in str(step) for step in place)


class Array(Protocol):
    """An object with torch's shape and dtype: a tensor, or a record of one."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> torch.dtype: ...


def dtype_and_shape(tensor: Array) -> str:
    """``float32[8,4]``, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}[{','.join(str(size) for size in tensor.shape)}]"


def qualified_name(argument: str, name: str, joint: str | None = None) -> str:
    """The name of a leaf in messages: the argument, and the leaf's path in it.

    joint: the text before a path that begins with neither bracket nor dot. Without it, such a path is put into
        parentheses.
    """
    if not name or name.startswith(("[", ".")):
        return f"{argument}{name}"
    return f"{argument} ({name})" if joint is None else f"{argument}{joint}{name}"
