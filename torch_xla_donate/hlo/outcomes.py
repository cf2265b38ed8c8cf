"""The results of a compilation: memory, and for each donor the output that took it or the reason why none did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    alike: dict[Any, list[Output]] = {}  # by dtype and sizes of the whole array
    for output in outputs:
        alike.setdefault((output.whole.dtype, output.whole.dims), []).append(output)
    outcomes = []
    for place, shape in after.leaves.items():
        donor = BufferDonor(*place)
        if donor in taken:
            outcomes.append(DonorOutcome(donor, shape, taken[donor]))
        elif donor in left:
            others = alike.get((whole[place].dtype, whole[place].dims), [])
            outcomes.append(DonorOutcome(donor, shape, None, _reason(shape, others, sizes)))
    return tuple(outcomes)


def _reason(shape: HloShape, alike: Sequence[Output], sizes: Counter[int]) -> str:
    size = shape.padded_bytes
    padded = "padded " if size != shape.bytes else ""
    if sizes[size]:
        taken = "the only output" if sizes[size] == 1 else f"all {sizes[size]} outputs"
        return f"other inputs already gave their memory to {taken} of {size} {padded}bytes"
    other = next((output for output in alike if output.shape.dims != shape.dims), None)
    if other is not None:
        number = ".".join(map(str, other.place)) or "0"
        return (
            f"no output has {size} {padded}bytes on a device. Output {number} has the whole array's shape, but is "
            f"sharded differently ({other.shape}, {other.shape.padded_bytes} bytes)"
        )
    return f"no output has {size} {padded}bytes on a device"
