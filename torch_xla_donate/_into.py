"""donate_buffer(..., into=...): which output should take a buffer over, and whether it did.

The hooks order the graph's parameters so that XLA pairs each donor with its target (csrc/step/parameter_order.h).
Whether the pair was kept is read from the addresses of the two buffers. That means to wait for both, so it is done for
the first step of each place in the code; later steps are compared when their buffers happen to be ready, and answer by
the graph otherwise: a compiled graph pairs alike at every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _host, _leaves, _reuse
from torch_xla_donate._errors import DonatedBufferError, DonationError


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
            with _reuse.unreported():
                pointer = _host.buffer_pointer(target)
        except DonatedBufferError:
            return True
        self.kept = None if pointer is None else pointer == self._source_pointer
        return True


class Paired:
    """Names of leaves, with the pairs that were asked for. Outlives the step, so it holds no tensor."""

    def __init__(
        self, names: _leaves.Names, wanted: list[tuple[int, torch.Tensor, torch.Tensor]], may_wait: bool
    ) -> None:
        self.name = names.name
        self.pairs = {index: Pair(source, target, may_wait) for index, source, target in wanted}


_open: list[Pair] = []
_seen_sites: set[str] = set()
_kept_by_graph: dict[tuple[str, int], bool] = {}


def open_pairs() -> bool:
    """Whether a pair is waiting for its target."""
    return bool(_open)


def resolve_pairs(wait: bool) -> None:
    """Looks at the targets that have been computed; with ``wait``, after the running steps have ended."""
    _open[:] = [pair for pair in _open if not pair.resolve(wait)]


def kept(names: Any, leaf: int, graph: str) -> bool | None:
    """Whether the pair of a donor was kept; None if it has none, or if that is not known."""
    pair = getattr(names, "pairs", {}).get(leaf)
    if pair is None:
        return None
    if pair.kept is not None:
        _kept_by_graph[graph, leaf] = pair.kept
    return _kept_by_graph.get((graph, leaf))


def in_order(places: _leaves.Places, into: Any, count: int) -> Sequence[Any]:
    """The leaves of ``into``, each in the place of the donated leaf that it is meant for.

    count: how many leaves are donated.

    Raises ValueError if the numbers differ, or if both sides have keys and these differ.
    """
    targets, target_places = _leaves.flatten(into)
    if len(targets) != count:
        raise ValueError(
            f"into has {len(targets)} leaves, tensors has {count}; give one target for each donated tensor, "
            "or None for a tensor without one."
        )
    if isinstance(places, _leaves.Paths) and places.is_like(target_places):
        return targets
    # Dictionaries that were filled in different orders: what belongs together has the same keys.
    by_place = {target_places.place(i): target for i, target in enumerate(targets)}
    wished = [places.place(i) for i in range(count)]
    if len(by_place) == count and by_place.keys() == set(wished):
        return [by_place[place] for place in wished]
    if all(map(_leaves.has_keys, (*by_place, *wished))):  # positions would be paired as such
        strange = next((i for i in range(count) if target_places.place(i) not in wished), None)
        name = "" if strange is None else target_places.name(strange)
        raise ValueError(
            f"into{name} has no counterpart in tensors, whose leaves are "
            f"{', '.join(places.name(i) for i in range(min(count, 5)))}{', ...' if count > 5 else ''}. Leaves with the "
            "same names belong together. Nothing was marked."
        )
    return targets


def pair(
    leaves: Sequence[Any], names: _leaves.Names, targets: Sequence[Any], where: str
) -> tuple[Paired, dict[int, torch.Tensor]]:
    """Validates the targets of the leaves to be donated at ``where``; the pairs, and each leaf's target.

    Raises:
        TypeError: a target is not a tensor.
        ValueError: the shapes, dtypes, devices or shardings of a pair differ.
        DonationError: a source is pending, or a target is materialised already.
    """
    wanted: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for index, (leaf, target) in enumerate(zip(leaves, targets)):
        if leaf is None or target is None:
            continue
        source, destination = _leaves.without_wrapper(leaf), _leaves.without_wrapper(target)
        label = _leaves.label("into", names.name(index))
        if not isinstance(destination, torch.Tensor):
            raise TypeError(f"{label} is of type {type(target).__name__}, not a tensor.")
        if not isinstance(source, torch.Tensor) or _C.state(source) in ("not_xla", "pending"):
            continue  # marking refuses this leaf, with a message of its own
        _check(label, source, destination)
        wanted.append((index, source, destination))
    first = where not in _seen_sites
    if first and any(not _C.has_value(source) for _, source, _ in wanted):
        _host.wait_for_devices()
    return Paired(names, wanted, first), {index: target for index, _, target in wanted}


def watch(paired: Paired, where: str) -> None:
    """The marks have been made: the pairs' targets are looked at from now on."""
    _seen_sites.add(where)
    _open.extend(paired.pairs.values())


def _check(label: str, source: torch.Tensor, target: torch.Tensor) -> None:
    if (source.shape, source.dtype) != (target.shape, target.dtype):
        raise ValueError(
            f"{label} is {_leaves.array(target)}, the donated tensor is {_leaves.array(source)}: a buffer can only be "
            "handed to an output of the same shape and dtype."
        )
    if source.device != target.device:
        raise ValueError(f"{label} is on {target.device}, the donated tensor on {source.device}.")
    if _C.state(target) != "pending":
        raise DonationError(
            f"{label} is materialised already, so the next step has no output for it. Name a tensor that the step "
            "will compute, before torch_xla.sync()."
        )
    source_sharding, target_sharding = _host.sharding_spec(source), _host.sharding_spec(target)
    if target_sharding and source_sharding != target_sharding:
        raise ValueError(
            f"{label} is sharded {target_sharding}, the donated tensor {source_sharding or 'not at all'}: their bytes "
            "per device differ, or lie elsewhere."
        )
