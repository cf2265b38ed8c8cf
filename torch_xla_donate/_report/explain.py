"""Explains why XLA did not use a donor, from the sizes of donors and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_xla_donate import _C
from torch_xla_donate._report.reasons import Reason


class Explanation(NamedTuple):
    """A reason with its sentence."""

    code: Reason
    sentence: str


def explain(raw: Mapping[str, Any], outputs: Sequence[str], offered: Sequence[int | None]) -> Explanation:
    """The reason why XLA did not use a donor of its donor set.

    XLA gives a donor to an output of the same bytes on each device, of any dtype and shape (measured on 2.9.0). So the
    sizes of the outputs give most reasons.

    Args:
        raw: the donor.
        outputs: the outputs of the step; empty texts for those that are gone.
        offered: bytes on a device of all donors in the set.
    """
    dynamic = next((text.partition("{")[0] for text in outputs if "<=" in text), "")
    if dynamic:
        return Explanation(
            Reason.DYNAMIC_SIZE,
            f"an output has a size that only the device knows, {dynamic}, and XLA aliases nothing in such a graph",
        )
    known = [text for text in outputs if text]
    size = raw["size"]
    is_sharded = bool(split_sharding(raw["array"])[1])
    each = " on each device" if is_sharded else ""
    if size != raw["bytes_per_device"]:
        each = f", padded from {raw['bytes_per_device']} to TPU tiles{each},"
    free = _C.FreeOutputs([_C.size_on_device(text) for text in known])
    fitting = free.count(size)
    if not fitting:
        if not known or len(known) < len(outputs):
            return Explanation(
                Reason.OUTPUTS_GONE, "XLA did not use it; outputs of the step are gone, so their sizes are not known"
            )
        alike = [text for text in known if _C.bytes_per_device(split_sharding(text)[0]) == raw["bytes"]]
        if alike and is_sharded:
            return Explanation(Reason.SHARDED_DIFFERENTLY, _differs_per_device(raw, alike[0], len(known) == 1))
        sizes = free.sizes()
        shown = ", ".join(f"{free.count(bytes_)} of {bytes_} bytes" for bytes_ in sizes[:4])
        return Explanation(
            Reason.NO_OUTPUT_OF_ITS_SIZE,
            f"no output of the step has its size of {size} bytes{each} "
            f"(outputs: {shown}{', ...' if len(sizes) > 4 else ''})",
        )
    rivals = offered.count(size)
    if rivals > fitting:
        outputs_of_size = f"{fitting} output{'s' if fitting > 1 else ''}"
        return Explanation(
            Reason.MORE_DONORS_THAN_OUTPUTS,
            f"more donors than outputs of its size: {rivals} donors and {outputs_of_size} of {size} bytes{each}",
        )
    return Explanation(
        Reason.OUTPUTS_TAKEN,
        f"every {size}-byte output{each} already reuses another input (torch_xla donates in-place updates), or the "
        "buffer is exported (dlpack, numpy)",
    )


def _differs_per_device(raw: Mapping[str, Any], output: str, alone: bool) -> str:
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
