"""Explains why XLA did not use a donor, from the sizes of donors and outputs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

from torch_xla_donate import _C
from torch_xla_donate._report.reasons import Reason


class StepSizes:
    """The sizes by which XLA paired the donors of a step with its outputs.

    Args:
        outputs: the outputs of the step; empty texts for those that are gone.
        offered: bytes on a device of all donors in the donor set.
    """

    def __init__(self, outputs: Sequence[str], offered: Iterable[int | None]) -> None:
        self._dynamic = next((text.partition("{")[0] for text in outputs if "<=" in text), "")
        self._known = [text for text in outputs if text]
        self._is_complete = 0 < len(self._known) == len(outputs)
        self._outputs, self._offered = (
            Counter(one for one in sizes if one is not None) for sizes in (map(_C.size_on_device, self._known), offered)
        )

    @functools.cached_property
    def _by_whole_size(self) -> dict[int | None, str]:
        """An output for each size of whole arrays."""
        return {_C.bytes_per_device(split_sharding(text)[0]): text for text in reversed(self._known)}

    def explain(self, raw: _C._Donor) -> tuple[Reason, str]:
        """The reason why XLA did not use a donor of its donor set, and the sentence."""
        from torch_xla_donate.hlo.outcomes import padded_from, why_unused

        if self._dynamic:
            return (
                Reason.DYNAMIC_SIZE,
                f"an output has a size that only the device knows, {self._dynamic}, and XLA aliases nothing in such a "
                "graph",
            )
        size = raw["size"]
        is_sharded = bool(split_sharding(raw["array"])[1])
        if not self._outputs[size] and not self._is_complete:
            return (
                Reason.OUTPUTS_GONE,
                "XLA did not use it; outputs of the step are gone, so their sizes are not known",
            )
        if not self._outputs[size] and is_sharded and raw["bytes"] in self._by_whole_size:
            alike, is_alone = self._by_whole_size[raw["bytes"]], len(self._known) == 1
            return Reason.SHARDED_DIFFERENTLY, _differs_per_device(raw, alike, is_alone)
        padded = padded_from(size, raw["bytes_per_device"])
        each = " on each device" if is_sharded else ""
        code, sentence = why_unused(size, self._outputs, self._offered, f"{padded}{each}{',' if padded else ''}")
        return Reason(code), sentence


def _differs_per_device(raw: _C._Donor, output: str, alone: bool) -> str:
    _, donor_sharding = split_sharding(raw["array"])
    array, sharding = split_sharding(output)
    text = (
        f"an output has its size of {raw['bytes']} bytes, but not per device: the donor, sharded {donor_sharding}, "
        f"takes {raw['size']} bytes on each device, and the output {array}, sharded {sharding}, takes "
        f"{_C.size_on_device(output)}; "
    )
    if alone and sharding == "{replicated}" and not _C.is_even(raw["array"]):
        return f"{text}XLA does not shard the only output of a step if the devices do not divide it evenly, so pad it"
    return f"{text}shard donor and output alike"


def split_sharding(array: str) -> tuple[str, str]:
    """Splits 'f32[8,4]{1,0} sharding={...}' into array and sharding."""
    whole, _, sharding = array.partition(" sharding=")
    return whole.partition("{")[0], sharding
