"""The results of a compilation: memory, and for each donor the output that took it or the reason why none did."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch_xla_donate._text import cut, plural
from torch_xla_donate.hlo.model import BufferDonor, HloModule, HloShape


@dataclass(frozen=True)
class MemoryAnalysis:
    """Bytes of one run on one device, as XLA counts them. Arguments and outputs both include the aliased bytes.

    `peak_bytes` is the sum of arguments, outputs and temporaries. It counts aliased bytes once.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    generated_code_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


def read_statistics(text: str) -> MemoryAnalysis | None:
    """XLA's `CompiledMemoryStats` of an executable, from their text; None if the platform reports none."""
    sizes = {f"{name}_bytes": int(size) for name, size in re.findall(r"(\w+)_size_in_bytes=(\d+)", text)}
    names = [field.name for field in fields(MemoryAnalysis)]
    return MemoryAnalysis(*(sizes[name] for name in names)) if sizes.keys() >= set(names) else None


@dataclass(frozen=True, slots=True)
class DonorOutcome:
    """The outcome of a donor.

    donor: the parameter.
    shape: its array on one device, with the layout that the compiler chose.
    output: the index of the output that reuses its memory, in the module before optimisation; None if none does.
    reason: why none does; empty if one does.
    name: the argument's name in the program, such as `argument 0['w']`; empty if it is not known.
    """

    donor: BufferDonor
    shape: HloShape
    output: tuple[int, ...] | None
    reason: str = ""
    name: str = ""

    def __str__(self) -> str:
        name = self.name or f"parameter {self.donor}"
        if self.output is None:
            return f"{name} {self.shape}: {self.reason}"
        return f"{name} {self.shape}: output {'.'.join(map(str, self.output)) or 0}"


class Output(NamedTuple):
    """An output: its place and whole array before optimisation, and its array on one device."""

    place: tuple[int, ...]
    whole: HloShape
    shape: HloShape


def donor_outcomes(before: HloModule, after: HloModule) -> tuple[DonorOutcome, ...]:
    """The outcome of each donor of a compiled module, in the order of the parameters.

    XLA pairs donors with outputs of the same size in a device's memory: bytes on CPU and GPU, bytes padded to tiles on
    TPU (`HloShape.padded_bytes`).

    before: the module before optimisation, with its parameters in the same order. Its shapes are global.
    after: the module after optimisation. Its shapes are those of one device, with the compiler's layouts.
    """
    outputs = [Output(*whole, shape) for whole, (_, shape) in zip(before.result.leaves(), after.result.leaves())]
    index_of = {index: output.place for (index, _), output in zip(after.result.leaves(), outputs)}
    taken, left = {alias.donor: index_of[alias.output_index] for alias in after.aliases}, set(after.donors)
    whole = dict(zip(after.leaves, before.leaves.values()))
    sizes = Counter(output.shape.padded_bytes for output in outputs)
    offered = Counter(after.shape_of(donor).padded_bytes for donor in (*taken, *left))
    alike: dict[Any, list[Output]] = {}  # by dtype and sizes of the whole array
    for output in outputs:
        alike.setdefault((output.whole.dtype, output.whole.dims), []).append(output)
    outcomes = []
    for place, shape in after.leaves.items():
        donor = BufferDonor(*place)
        if donor in taken:
            outcomes.append(DonorOutcome(donor, shape, taken[donor]))
        elif donor in left:
            size, bytes_ = shape.padded_bytes, shape.bytes
            _, reason = why_unused(size, sizes, offered, padded_from(size, bytes_))
            others = alike.get((whole[place].dtype, whole[place].dims), [])
            other = next((output for output in others if output.shape.dims != shape.dims), None)
            if other is not None and not sizes[size]:
                number = ".".join(map(str, other.place)) or "0"
                reason += (
                    f". Output {number} has the whole array's shape, but is sharded differently ({other.shape}, "
                    f"{other.shape.padded_bytes} bytes)"
                )
            outcomes.append(DonorOutcome(donor, shape, None, reason))
    return tuple(outcomes)


def why_unused(
    size: int | None, outputs: Mapping[int, int], offered: Mapping[int, int], note: str = ""
) -> tuple[str, str]:
    """Why XLA gave the memory of a donor to no output: the value of a `Reason`, and the sentence.

    XLA gives a donor to an output of the same bytes on each device, of any dtype and shape (measured on 2.9.0). So the
    sizes give the reason.

    Args:
        size: bytes of the donor in a device's memory; None if unknown.
        outputs: the number of outputs of each size.
        offered: the number of donors of each size.
        note: follows the size of the donor.
    """
    fitting, rivals = (0, 0) if size is None else (outputs.get(size, 0), offered.get(size, 0))
    if not fitting:
        shown = ", ".join(cut([f"{outputs[one]} of {one} bytes" for one in sorted(outputs)], 4, "..."))
        return "no_output_of_its_size", f"no output of the step has its size of {size} bytes{note} (outputs: {shown})"
    if rivals > fitting:
        return "more_donors_than_outputs", (
            f"more donors than outputs of its size: {rivals} donors and {plural(fitting, 'output')} of {size} "
            f"bytes{note}"
        )
    return "outputs_taken", (
        f"every {size}-byte output{note} already reuses another input (torch_xla donates in-place updates), or the "
        "buffer is exported (dlpack, numpy)"
    )


def padded_from(size: int | None, bytes_: int | None) -> str:
    """A note on the size of a donor."""
    return f", padded from {bytes_} to TPU tiles" if size != bytes_ else ""
