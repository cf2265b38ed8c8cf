"""Keys for caches of traces: a function cannot distinguish values whose keys are equal."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import types
from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

_EQUAL_IS_SAME = {str, bytes, int, bool, types.NoneType}  # only these values themselves equal them in their type


def same(value: object) -> Hashable:
    """The key of an object that counts by its identity, and holds the object."""
    return types.MethodType(id, value)  # methods compare their objects by identity


def exact(value: Any) -> Hashable:
    """A key that also distinguishes equal values: 1, 1.0 and True; 0.0 and -0.0. NaN equals NaN.

    It looks into builtin containers and dataclasses. Other objects count by their `==`, or by their identity if they
    have no hash. Raises RecursionError for containers that contain themselves.
    """
    kind = type(value)
    if kind in _EQUAL_IS_SAME or kind.__eq__ is object.__eq__:  # type: ignore[comparison-overlap]
        return kind, value
    if isinstance(value, tuple | list | deque):
        kinds = tuple(map(type, value))
        items = value if _EQUAL_IS_SAME.issuperset(kinds) else map(exact, value)
        return kind, kinds, tuple(items), getattr(value, "maxlen", None)
    if isinstance(value, enum.Enum | torch.Tensor):
        return kind, same(value)
    if isinstance(value, float):
        return kind, float.hex(value)
    if isinstance(value, complex):
        return kind, float.hex(value.real), float.hex(value.imag)
    if isinstance(value, set | frozenset):
        return kind, frozenset(map(exact, value))
    if isinstance(value, dict):
        return kind, tuple((exact(key), exact(item)) for key, item in value.items())
    if isinstance(value, slice | range):
        return kind, exact((value.start, value.stop, value.step))
    if isinstance(value, decimal.Decimal | numpy.inexact):
        return kind, repr(value)
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        return kind, value.dtype, value.shape, value.tobytes()
    is_record = dataclasses.is_dataclass(value)
    try:
        hash(value)
        own: Hashable = value
    except TypeError:
        own = None if is_record else same(value)
    fields = dataclasses.fields(value) if is_record else ()
    key: list[Any] = [kind, own, *(exact(getattr(value, field.name)) for field in fields if field.compare)]
    return tuple(key)


def structure_key(structure: pytree.TreeSpec) -> Hashable:
    """An exact key of a pytree's structure: types, keys, and contexts of registered classes.

    It is flat, so that neither its hash nor its comparison recurses.
    """
    tokens: list[Hashable] = []
    todo = [structure]
    while todo:
        node = todo.pop()
        children = node.children_specs
        has_leaves_only = node.num_nodes - 1 == node.num_leaves == len(children)
        context = None if node.context is None else exact(node.context)
        tokens += (node.type, context, len(children), has_leaves_only)
        if not has_leaves_only:
            todo += children
    return tuple(tokens)
