"""Finds out whether the output that `into=` named reused the buffer.

It compares the addresses of the two buffers, and waits for both at the first step of each line. Later steps are
compared only if their buffers are ready. Otherwise the graph decides, because a compiled graph pairs alike at each run.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torch_xla_donate import _C, _host, _trees
from torch_xla_donate._errors import DonatedBufferError
from torch_xla_donate._report.reuse import suppress_reuse_warnings


class Pair:
    """A donor's address, and the tensor that should reuse it.

    kept: True or False once both addresses are known. None before, and if they stay unknown: the target is gone or
        overwritten, the source was not computed yet, or the platform gives no addresses.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, may_wait: bool) -> None:
        self.kept: bool | None = None
        self._may_wait = may_wait
        self._source_pointer = _host.buffer_pointer(source) if _C.has_value(source) else None
        self._target = weakref.ref(target)

    def resolve(self, wait: bool) -> bool:
        """Compares the addresses. Returns False if this has to be tried again later."""
        target = self._target()
        if target is None or self._source_pointer is None:
            return True
        if _C.state(target) == "pending":
            return False
        if wait or self._may_wait:
            _C.wait_for_steps()
        if not _C.has_value(target):
            return _C.state(target) == "donated"
        try:
            with suppress_reuse_warnings():
                pointer = _host.buffer_pointer(target)
        except DonatedBufferError:
            return True
        self.kept = None if pointer is None else pointer == self._source_pointer
        return True


class Paired:
    """Names of leaves, with the requested pairs. Outlives the step, so it holds no tensor."""

    def __init__(
        self, names: _trees.Names, wanted: list[tuple[int, torch.Tensor, torch.Tensor]], may_wait: bool
    ) -> None:
        self.name = names.name
        self.pairs = {index: Pair(source, target, may_wait) for index, source, target in wanted}


_open: dict[Pair, None] = {}  # oldest first
_seen_sites: set[str] = set()
_kept_by_graph: dict[tuple[str, int], bool] = {}


def is_known_site(where: str) -> bool:
    """Whether a pair of this line was seen before."""
    return where in _seen_sites


def resolve_pairs(wait: bool) -> None:
    """Compares the pairs whose targets are computed. With ``wait``, first waits for running steps."""
    for pair in list(_open):
        if pair.resolve(wait):
            _open.pop(pair, None)  # another thread may have removed it


def pair_kept(names: Any, leaf: int, graph: str) -> bool | None:
    """Whether XLA kept the pair of a donor; None without a pair, or if unknown."""
    pair = getattr(names, "pairs", {}).get(leaf)
    if pair is None:
        return None
    if pair.kept is not None:
        _kept_by_graph[graph, leaf] = pair.kept
    return _kept_by_graph.get((graph, leaf))


def watch_pairs(paired: Paired, where: str) -> None:
    """Starts to watch the targets of pairs whose marks are made."""
    _seen_sites.add(where)
    _open.update(dict.fromkeys(paired.pairs.values()))
