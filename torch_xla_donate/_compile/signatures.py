"""Counts the signatures that a function was traced or compiled for, and warns of many."""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from torch_xla_donate import _C, _trees
from torch_xla_donate._errors import see, warn

LIMIT = 10  # signatures of one function before the warning
_SHOWN = 4


def signature_of(leaves: list[Any]) -> _C.Signature:
    """The signature that a graph of these inputs is compiled for. Raises ValueError if only the device knows a size."""
    found = _C.signature(leaves)
    if found.dynamic:
        raise ValueError(
            "only the device knows the size of an argument, but a graph is compiled for fixed sizes. Use the lazy "
            f"backend, without pure=True. {see('pure')}"
        )
    return found


class Signatures:
    """The first signatures of a function. Warns once, at the tenth.

    Args:
        function: the function's name in messages.
        per: the work for each signature, such as "traced".
    """

    def __init__(self, function: str, per: str) -> None:
        self._function, self._per = function, per
        self._seen: dict[Hashable, None] | None = {}

    def note(self, leaves: Iterable[tuple[str, Any]], where: str) -> None:
        """Notes the arguments of a call, by their names. After the warning it does nothing."""
        if self._seen is None:
            return
        self._seen[tuple((name, _kind(leaf)) for name, leaf in leaves)] = None
        if len(self._seen) < LIMIT:
            return
        signatures, self._seen = self._seen, None
        warn(self._text([dict(signature) for signature in signatures]), where)  # type: ignore[call-overload]

    def _text(self, signatures: list[dict[str, Hashable]]) -> str:
        start = f"{self._function} has been {self._per} for {LIMIT} signatures"
        names = list(dict.fromkeys(name for signature in signatures for name in signature))
        kinds = {name: list(dict.fromkeys(signature.get(name, "absent") for signature in signatures)) for name in names}
        most = max(names, key=lambda name: len(kinds[name]))
        shown = ", ".join(str(kind) for kind in kinds[most][:_SHOWN])
        shown += ", ..." if len(kinds[most]) > _SHOWN else ""
        others = sum(len(found) > 1 for found in kinds.values()) - 1
        more = f" ({others} other leaves differ, too)" if others > 0 else ""
        return (
            f"{start}, each of which takes time and memory. {most} differs: {shown}{more}. Keep shapes and dtypes "
            "fixed, for example by padding, and pass a number that changes as a tensor (with pure=True, as a float). "
            f"{see('compile_errors')}"
        )


def _kind(leaf: Any) -> str:
    """The part of a leaf that belongs to the signature, as text. Holds no reference to the leaf."""
    tensor = _trees.without_wrapper(leaf)
    if isinstance(tensor, torch.Tensor):
        return _trees.dtype_and_shape(tensor) + (" with requires_grad" if tensor.requires_grad else "")
    if isinstance(leaf, bool | int | float | str | bytes | types.NoneType):
        return repr(leaf)
    try:
        return f"{type(leaf).__name__} of hash {hash(leaf)}"
    except TypeError:
        return type(leaf).__name__
