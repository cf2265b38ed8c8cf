"""Puts the Python floats among the arguments of a pure function into its trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla_donate import _numbers, _trace
from torch_xla_donate._compile.arguments import CallArguments


def upload_floats(leaves: Sequence[Any]) -> torch.Tensor | None:
    """Uploads the floats among a call's leaves as one vector; None if there are none.

    torch_xla would cache a tensor of one number.
    """
    values = [float(leaf) for leaf in leaves if _numbers.is_float(leaf)]
    if not values:
        return None
    device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), "xla")
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(device)


def put_numbers(
    call: CallArguments, values: torch.Tensor | None, refuse: _trace.Refusal
) -> tuple[CallArguments, list[_numbers.Number]]:
    """The call with numbers in place of floats, and these numbers. `values` is from `upload_floats`."""
    if values is None:
        return call, []
    leaves, names = call.leaves(call.roles.nonstatic)
    texts = [names.name(position) for position, leaf in enumerate(leaves) if _numbers.is_float(leaf)]

    def refuse_read(numbers: Sequence[_numbers.Number]) -> Exception:
        return refuse(
            f"reads {_numbers.joined(numbers)} on the host, although pure=True traces Python floats",
            "Name that argument in static_argnums, or compute only with torch's operations on the device, such as "
            "torch.full((), lr, device=x.device)",
        )

    numbers = [_numbers.number(values[i].clone(), (text,), refuse_read) for i, text in enumerate(texts)]
    following = iter(numbers)
    return call.replaced(lambda leaf: next(following) if _numbers.is_float(leaf) else leaf), numbers
