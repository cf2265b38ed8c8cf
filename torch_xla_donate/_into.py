"""donate_buffer(..., into=...): which output should take a buffer over, and whether it did."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _host, _leaves
from torch_xla_donate._errors import DonatedBufferError, DonationError


class Pair:
    """A donor's address, and the tensor that should come to live there.

    kept: True or False once both addresses are known; None before, and where that cannot be told (the target has gone
        or was overwritten before anybody looked, or the platform does not give addresses).
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.kept: bool | None = None
        self._source_pointer = _host.buffer_pointer(source)
        self._target = weakref.ref(target)

    def resolve(self) -> bool:
        """Looks at the target; False if it has to be looked at again later."""
        target = self._target()
        if target is None or self._source_pointer is None:
            return True
        if _C.state(target) == "pending":
            return False
        _C.wait_for_steps()
        if not _C.has_value(target):
            return True
        try:
            pointer = _host.buffer_pointer(target)
        except DonatedBufferError:
            return True
        self.kept = None if pointer is None else pointer == self._source_pointer
        return True


class Paired:
    """Names of leaves, with the pairs that were asked for."""

    def __init__(self, names: _leaves.Names, pairs: dict[int, Pair]) -> None:
        self.name = names.name
        self.pairs = pairs


_open: list[Pair] = []


def open_pairs() -> bool:
    """Whether a pair is waiting for its target."""
    return bool(_open)


def resolve_pairs() -> None:
    """Looks at all targets that have been computed. Waits for running steps."""
    _open[:] = [pair for pair in _open if not pair.resolve()]


def pair(leaves: Sequence[Any], names: _leaves.Names, into: Any) -> Paired:
    """Validates ``into`` against the leaves to be donated.

    Raises:
        TypeError: a target is not a tensor.
        ValueError: the numbers of leaves differ, or a pair's shapes, dtypes, devices or shardings do.
        DonationError: a source is pending, or a target is materialised already.
    """
    targets, _ = _leaves.flatten(into)
    if len(targets) != len(leaves):
        raise ValueError(
            f"into has {len(targets)} leaves, tensors has {len(leaves)}; give one target for each donated tensor, "
            "or None for a tensor without one."
        )
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
    if any(not _C.has_value(source) for _, source, _ in wanted):
        _host.xlac()._xla_wait_device_ops([])
    return Paired(names, {index: Pair(source, target) for index, source, target in wanted})


def watch(paired: Paired) -> None:
    """The marks have been made: the pairs' targets are looked at from now on."""
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
