"""Puts the Python floats among the arguments of a pure function into its trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _frames, _numbers, _trace, _trees
from torch_xla_donate._compile.arguments import ArgumentRoles, CallNames


def upload_floats(leaves: Sequence[Any]) -> torch.Tensor:
    """Uploads the floats among a call's leaves as one vector. torch_xla would cache a tensor of one number."""
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), "xla")
    return torch.tensor(_numbers.values_of(leaves), dtype=torch.float64, device="cpu").to(device)


def put_numbers(
    function: str, roles: ArgumentRoles, args: list[Any], kwargs: dict[str, Any], values: torch.Tensor
) -> list[_numbers.Number]:
    """Replaces the floats among the arguments by numbers, and returns these. `values` is the uploaded vector."""
    arguments = roles.donated + roles.kept
    parts = [_trees.flatten(argument.value(args, kwargs)) for argument in arguments]
    names = CallNames([(argument, len(found), names) for argument, (found, names) in zip(arguments, parts)])
    leaves = itertools.chain.from_iterable(found for found, _ in parts)
    texts = [names.name(position) for position, leaf in enumerate(leaves) if _numbers.is_float(leaf)]
    numbers = _numbers.numbers_for(values, texts, lambda used: _reads_float(function, used))
    following = iter(numbers)
    for argument in arguments:
        into: Any = kwargs if isinstance(argument.key, str) else args
        into[argument.key] = pytree.tree_map(
            lambda leaf: next(following) if _numbers.is_float(leaf) else leaf, into[argument.key]
        )
    return numbers


def _reads_float(function: str, numbers: Sequence[_numbers.Number]) -> Exception:
    names = _numbers.joined(numbers)
    return _trace.impure(
        function,
        _frames.call_site(),
        f"reads {names} on the host, although pure=True traces Python floats",
        "Name that argument in static_argnums, or compute only with torch's operations",
    )
