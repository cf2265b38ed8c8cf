"""Python floats among the arguments of a pure function, put into its trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _frames, _numbers, _trace, _trees
from torch_xla_donate._compile.arguments import CallNames, Plan


def upload_floats(leaves: Sequence[Any]) -> torch.Tensor:
    """The floats among a call's leaves, in one transfer. One vector: torch_xla would cache a tensor of one number."""
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), "xla")
    return torch.tensor(_numbers.values_of(leaves), dtype=torch.float64, device="cpu").to(device)


def put_numbers(
    function: str, plan: Plan, args: list[Any], kwargs: dict[str, Any], values: torch.Tensor
) -> list[_numbers.Number]:
    """Puts numbers in the place of the floats among the arguments, and returns them; `values` as uploaded."""
    slots = plan.donated + plan.kept
    parts = [_trees.flatten(slot.value(args, kwargs)) for slot in slots]
    names = CallNames([(slot, len(found), names) for slot, (found, names) in zip(slots, parts)])
    leaves = itertools.chain.from_iterable(found for found, _ in parts)
    texts = [names.name(position) for position, leaf in enumerate(leaves) if _numbers.is_float(leaf)]
    numbers = _numbers.stand_ins(values, texts, lambda used: _reads_float(function, used))
    following = iter(numbers)
    for slot in slots:
        into: Any = kwargs if isinstance(slot.key, str) else args
        into[slot.key] = pytree.tree_map(
            lambda leaf: next(following) if _numbers.is_float(leaf) else leaf, into[slot.key]
        )
    return numbers


def _reads_float(function: str, numbers: Sequence[_numbers.Number]) -> Exception:
    names = _numbers.joined(numbers)
    return _trace.impure(
        function,
        _frames.call_site(),
        f"reads {names} on the host, a Python float, which is traced",
        "Name that argument in static_argnums, so that each value has a trace, or compute with torch's operations only",
    )
