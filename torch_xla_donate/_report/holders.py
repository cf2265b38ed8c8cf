"""Finds the holder of a buffer: a variable, what a variable leads to, or a graph of autograd."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_xla_donate import _C
from torch_xla_donate._report.walk import Name, Named, name_tensors

UNKNOWN = "unknown holder"
_SEARCHED = 16  # graphs of autograd that are named
_NODES = 20000  # of all graphs of autograd


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
    for name, saved in graphs_saving(missing, named.values()):
        found.update(dict.fromkeys(saved, graph_text(name)))
        missing -= saved
    return found


def references(buffers: set[int], named: Mapping[int, Named]) -> dict[int, list[Name]]:
    """The references to the tensors of each buffer, each by its shortest name."""
    found: dict[int, dict[tuple[object, ...], Name]] = {buffer: {} for buffer in buffers}
    for each in named.values():
        tensor = each.tensor()
        held = set() if tensor is None else {_C.holds(tensor), _C.base_holds(tensor)}
        for buffer, name in itertools.product(held & found.keys(), each.names):
            found[buffer].setdefault(name.slot, name)
    return {buffer: list(names.values()) for buffer, names in found.items()}


def graph_text(name: Name) -> str:
    """The text for the graph of autograd of a tensor."""
    return f"grad_fn of {name.holder(with_path=True)}"


def graphs_saving(buffers: set[int], named: Iterable[Named]) -> Iterator[tuple[Name, set[int]]]:
    """The tensors whose graphs of autograd save some of these buffers; the caller may take out what it has found.

    At most 16 graphs, and 20,000 nodes of all graphs.
    """
    budget = itertools.repeat(None, _NODES)
    left = _SEARCHED
    for each in {id(each.tensor()): each for each in named}.values():  # a tensor may have several alias ids
        tensor = each.tensor()
        if not buffers or not left:
            return
        if tensor is None or tensor.grad_fn is None:
            continue
        # A result inside another graph does not keep that graph alive.
        saved = {_C.holds(leaf) for leaf in _saved(tensor.grad_fn, budget)} & buffers
        if saved:
            left -= 1
            yield each.names[0], saved


def _saved(root: Any, budget: Iterator[None]) -> Iterator[torch.Tensor]:
    """The tensors that a graph saves, as far as Python can read them. It takes one from the budget for each node."""
    seen = {None, root}
    nodes = [root]  # grows while it is read
    for node, _ in zip(nodes, budget):
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)
        names = [name for name in dir(node) if name.startswith("_saved_")] + ["variable", "saved_tensors"]
        for name in names:
            try:
                raw = getattr(node, f"_raw_{name.removeprefix('_')}", ())
                if any(map(_C.has_unpack_hook, raw if isinstance(raw, list | tuple) else (raw,))):
                    continue  # a hook may compute again, as that of torch.utils.checkpoint does
                value = getattr(node, name, None)
            except RuntimeError:  # the backward pass has freed it
                continue
            for leaf in value if isinstance(value, list | tuple) else (value,):
                if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla":
                    yield leaf
