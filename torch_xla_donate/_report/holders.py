"""Finds the holder of a buffer: a variable, what a variable leads to, or a graph of autograd."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_xla_donate import _C
from torch_xla_donate._locks import make_lock
from torch_xla_donate._report.walk import Name, Named, name_tensors

UNKNOWN = "unknown holder"
_SEARCHED = 16  # graphs of autograd that are named
_NODES = 20000  # of all graphs of autograd
# Held during a search for names or holders. References of another search would count as those of the program.
searching = make_lock()


def holders_of(buffers: Sequence[int]) -> dict[int, str]:
    """The holder of each buffer, as far as Python can find it. Omits buffers with an unknown holder."""
    if not buffers:
        return {}
    named = name_tensors()
    found = {
        buffer: min(names, key=lambda name: len(name.path)).holder(with_path=True)
        for buffer, names in references({*buffers}, named).items()
        if names
    }
    missing = {*buffers} - found.keys()
    for name, saved in _Graphs(named.values()).saving(missing):
        found.update(dict.fromkeys(saved, graph_text(name)))
        missing -= saved
    return found


def references(buffers: set[int], named: Mapping[int, Named]) -> dict[int, list[Name]]:
    """The references to the tensors of each buffer, each by its shortest name."""
    found: dict[int, dict[tuple[object, ...], Name]] = {buffer: {} for buffer in buffers}
    for each in named.values():
        tensor = each.tensor()
        buffer = _C.holds(tensor) if tensor is not None else 0
        del tensor  # its references are counted later
        for name in each.names if buffer in found else ():
            found[buffer].setdefault(name.slot, name)
    return {buffer: list(names.values()) for buffer, names in found.items()}


def graph_text(name: Name) -> str:
    """The text for the graph of autograd of a tensor."""
    return f"grad_fn of {name.holder(with_path=True)}"


def other_holders(known: Mapping[int, int], named: Mapping[int, Named]) -> tuple[dict[int, list[Name]], set[int]]:
    """The holders of buffers beside those with names.

    Args:
        known: for each buffer the number of its `references`.
        named: the tensors with names.

    Returns:
        For each buffer the tensors whose graphs of autograd save it, and the buffers that something else refers to.
    """
    # isinstance() would call a proxy's __class__.
    tensors = [leaf for leaf in gc.get_objects() if issubclass(type(leaf), torch.Tensor) and leaf.device.type == "xla"]
    counted, objects = Counter[int](), Counter[int]()
    for probe in [object()]:
        ours = sys.getrefcount(probe)  # of a list, a loop and this function
    for tensor in tensors:
        buffer = _C.holds(tensor)
        counted[buffer] += sys.getrefcount(tensor) - ours
        objects[buffer] += 1
    graphs = _Graphs(named.values())
    found: dict[int, list[Name]] = {buffer: [] for buffer in known}
    for name, saved in graphs.saving(set(known)):
        for buffer in saved:
            found[buffer].append(name)
    unknown = set()
    for buffer, names in found.items():
        # A graph refers to a tensor only if Python does not.
        of_graphs = objects[buffer] - min(known[buffer], 1) if names else 0
        is_all = counted[buffer] <= known[buffer] + of_graphs and not (names and graphs.are_more)
        if not is_all or not (known[buffer] or names):
            unknown.add(buffer)
    return found, unknown


class _Graphs:
    """The graphs of autograd of tensors with names, as far as Python can read them.

    are_more: whether a bound has ended the search, or it has met an unpack hook, which it does not call.
    """

    def __init__(self, names: Iterable[Named]) -> None:
        self._names = {id(each.tensor()): each for each in names}.values()  # a tensor may have several alias ids
        self._nodes_left = _NODES
        self.are_more = False

    def saving(self, buffers: set[int]) -> Iterator[tuple[Name, set[int]]]:
        """The tensors whose graphs save some of these buffers, until all are taken out of the set."""
        named = 0
        for named_tensor in self._names:
            tensor = named_tensor.tensor()
            if not buffers:
                return
            if tensor is None or tensor.grad_fn is None:
                continue
            if named == _SEARCHED or self._nodes_left == 0:
                self.are_more = True
                return
            # A result inside another graph does not keep that graph alive.
            saved = {_C.holds(leaf) for leaf in self._saved(tensor.grad_fn)} & buffers
            if saved:
                named += 1
                yield named_tensor.names[0], saved

    def _saved(self, node: Any) -> Iterator[torch.Tensor]:
        """The tensors that a graph saves."""
        seen: set[Any] = set()
        open_nodes = [node]
        while open_nodes and self._nodes_left > 0:
            node = open_nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._nodes_left -= 1
            open_nodes += [following for following, _ in node.next_functions]
            names = [name for name in dir(node) if name.startswith("_saved_")] + ["variable", "saved_tensors"]
            for name in names:
                try:
                    raw = getattr(node, f"_raw_{name.removeprefix('_')}", ())
                    if any(map(_C.has_unpack_hook, raw if isinstance(raw, list | tuple) else (raw,))):
                        self.are_more = True  # a hook may compute again, as that of torch.utils.checkpoint does
                        continue
                    value = getattr(node, name, None)
                except RuntimeError:  # the backward pass has freed it
                    continue
                for leaf in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla":
                        yield leaf
