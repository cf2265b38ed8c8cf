"""Whether the output that `into=` named took the buffer over.

It is read from the addresses of the two buffers. That means to wait for both, so it is done for the first step of each
place in the code; later steps are compared when their buffers happen to be ready, and answer by the graph otherwise: a
compiled graph pairs alike at every run.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torch_xla_donate import _C, _host, _trees
from torch_xla_donate._errors import DonatedBufferError
from torch_xla_donate._report.reuse import suppress_reuse_warnings


class Pair:
    """A donor's address, and the tensor that should come to live there.

    kept: True or False once both addresses are known; None before, and where they cannot be (the target has gone or was
        overwritten before anybody looked, the source was still being computed, or the platform gives no addresses).
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, may_wait: bool) -> None:
        self.kept: bool | None = None
        self._may_wait = may_wait
        self._source_pointer = _host.buffer_pointer(source) if _C.has_value(source) else None
        self._target = weakref.ref(target)

    def resolve(self, wait: bool) -> bool:
        """Looks at the target; False if it has to be looked at again later."""
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
    """Names of leaves, with the pairs that were asked for. Outlives the step, so it holds no tensor."""

    def __init__(
        self, names: _trees.Names, wanted: list[tuple[int, torch.Tensor, torch.Tensor]], may_wait: bool
    ) -> None:
        self.name = names.name
        self.pairs = {index: Pair(source, target, may_wait) for index, source, target in wanted}


_open: list[Pair] = []
_seen_sites: set[str] = set()
_kept_by_graph: dict[tuple[str, int], bool] = {}


def is_known_site(where: str) -> bool:
    """Whether pairs of this place in the code have been looked at before."""
    return where in _seen_sites


def open_pairs() -> bool:
    """Whether a pair is waiting for its target."""
    return bool(_open)


def resolve_pairs(wait: bool) -> None:
    """Looks at the targets that have been computed; with ``wait``, after the running steps have ended."""
    _open[:] = [pair for pair in _open if not pair.resolve(wait)]


def pair_kept(names: Any, leaf: int, graph: str) -> bool | None:
    """Whether the pair of a donor was kept; None if it has none, or if that is not known."""
    pair = getattr(names, "pairs", {}).get(leaf)
    if pair is None:
        return None
    if pair.kept is not None:
        _kept_by_graph[graph, leaf] = pair.kept
    return _kept_by_graph.get((graph, leaf))


def watch_pairs(paired: Paired, where: str) -> None:
    """The marks have been made: the pairs' targets are looked at from now on."""
    _seen_sites.add(where)
    _open.extend(paired.pairs.values())
