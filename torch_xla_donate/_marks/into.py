"""donate_buffer(..., into=...): checks the preferred outputs, and brings them into the order of the leaves.

The hooks order the graph's parameters so that XLA pairs each donor with its output (csrc/step/parameter_order.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _host, _trees
from torch_xla_donate._errors import DonationError, see


def outputs_in_order(places: _trees.Places, into: Any, count: int) -> Sequence[Any]:
    """The leaves of ``into``, in the order of the donated leaves.

    count: the number of donated leaves.

    Raises ValueError if the numbers differ, or if both sides have keys and these differ.
    """
    outputs, output_places = _trees.flatten(into, "into")
    if len(outputs) != count:
        raise ValueError(
            f"into has {len(outputs)} leaves, but tensors has {count}. Pass one target for each donated tensor, "
            f"or None for a tensor without one. {see('into')}"
        )
    # Dictionaries may have different orders, so leaves are paired by their keys.
    wished = places.places
    by_place = dict(zip(output_places.places, outputs))
    if len(by_place) == count and by_place.keys() == set(wished):
        return [by_place[place] for place in wished]
    if all(map(_trees.has_keys, (*by_place, *wished))):  # without keys, leaves are paired by position
        strange = next((i for i, place in enumerate(output_places.places) if place not in wished), None)
        name = "" if strange is None else output_places.name(strange)
        raise ValueError(
            f"into{name} has no counterpart in tensors, whose leaves are "
            f"{', '.join(places.name(i) for i in range(min(count, 5)))}{', ...' if count > 5 else ''}. Give both "
            f"trees the same keys. Nothing was marked. {see('into')}"
        )
    return outputs


def check_outputs(leaves: Sequence[Any], names: _trees.Names, outputs: Sequence[Any]) -> dict[int, torch.Tensor]:
    """Validates the preferred outputs of the donated leaves. Returns the output of each leaf that has one.

    Raises:
        TypeError: an output is not a tensor.
        ValueError: the shapes, dtypes, devices or shardings of a pair differ.
        DonationError: an output is materialised already.
    """
    checked: dict[int, torch.Tensor] = {}
    for index, (leaf, output) in enumerate(zip(leaves, outputs)):
        if leaf is None or output is None:
            continue
        label = _trees.qualified_name("into", names.name(index))
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"{label} is of type {type(output).__name__}, not a tensor. Pass a tensor that the step computes, or "
                f"None. {see('into')}"
            )
        if not isinstance(leaf, torch.Tensor) or _C.state(leaf) in ("not_xla", "pending"):
            continue  # marking refuses this leaf later
        _check(label, leaf, output)
        checked[index] = output
    return checked


def _check(label: str, source: torch.Tensor, output: torch.Tensor) -> None:
    if (source.shape, source.dtype) != (output.shape, output.dtype):
        raise ValueError(
            f"{label} is {_trees.dtype_and_shape(output)}, but the donated tensor is {_trees.dtype_and_shape(source)}. "
            f"Name an output of the same shape and dtype. {see('into')}"
        )
    if source.device != output.device:
        raise ValueError(
            f"{label} is on {output.device}, but the donated tensor is on {source.device}. Name an output on the same "
            f"device. {see('into')}"
        )
    if _C.state(output) != "pending":
        raise DonationError(
            f"{label} is materialised already, so the next step has no output for it. Name a tensor that the step "
            f"will compute, before torch_xla.sync(). {see('into')}"
        )
    source_sharding, output_sharding = _host.sharding_spec(source), _host.sharding_spec(output)
    if output_sharding and source_sharding != output_sharding:
        raise ValueError(
            f"{label} is sharded {output_sharding}, but the donated tensor {source_sharding or 'not at all'}. Shard "
            f"both alike. {see('into')}"
        )
