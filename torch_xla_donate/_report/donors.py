"""A donor of the report: its array, its outcome and the reason."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch_xla_donate import _C, hlo
from torch_xla_donate._report.explain import StepSizes, split_sharding
from torch_xla_donate._report.reasons import Reason, sentence

Outcome = Literal["donated", "unusable", "pending"]


@dataclasses.dataclass(frozen=True)
class Donor:
    """One marked buffer, or one that `auto_donate` has found.

    Attributes:
        name: name of the leaf, such as ``['layer1'].weight``. Tied tensors have several, joined by commas. Empty for a
            single tensor.
        where: ``file:line`` of the donation; empty for an automatic donor.
        shape: sizes of the whole array, before any sharding.
        dtype: XLA's name of the element type, such as ``f32``.
        bytes: bytes of the whole array.
        bytes_per_device: bytes on each device. Equal to ``bytes`` without SPMD. XLA compares these on CPU, and the
            bytes padded to tiles on a TPU.
        sharding: in XLA's notation, such as ``{devices=[4,1]0,1,2,3}``; empty without SPMD.
        device: such as ``CPU:0``.
        outcome: ``donated``, ``unusable`` or ``pending``.
        reason: why it is not donated; empty if it is.
        reason_code: the same as a `Reason`; None if it is donated.
        step: number of the step that read it, counted from 1 over steps with donors; None while pending.
        parameter: number of the donor among the parameters of the step's HLO; None while pending, if the package
            refused the donor, or if unknown.
        output: number of the output that reused the buffer, in the step's HLO; None if there is none or it is unknown.
        crossed: whether another output than the one computed from the donor reused the buffer, so that its value moves;
            None if no output is computed from it, or if unknown.
        into_kept: whether the output named by ``into=`` reused the buffer; None without ``into=`` or if unknown.
        automatic: whether `auto_donate` found it, and no mark.
    """

    name: str
    where: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    bytes_per_device: int
    sharding: str
    device: str
    outcome: Outcome
    reason: str
    step: int | None
    into_kept: bool | None
    automatic: bool
    output: int | None = None
    crossed: bool | None = None
    parameter: int | None = None
    reason_code: Reason | None = None

    @property
    def array(self) -> str:
        """Element type and shape in XLA's notation: ``f32[8,4]``."""
        return f"{self.dtype}[{','.join(str(size) for size in self.shape)}]"

    def to_dict(self) -> dict[str, Any]:
        """The donor as plain data for ``json.dumps``."""
        return {**dataclasses.asdict(self), "array": self.array}


class _Facts(NamedTuple):
    """Facts of a step's executable, by parameter number.

    output_of: the number of the output in the parameter's buffer.
    copied: the bytes of the parameter that XLA copies first. torch_xla also aliases tensors updated in place.
    """

    output_of: Mapping[int, int]
    copied: Mapping[int, int]


def facts_of(step: _C._Step) -> _Facts | None:
    """The facts of a step's graph; None if unknown. The time to read them is proportional to the HLO's size."""
    try:
        return _facts(step["graph"])
    except LookupError:
        return None


@functools.lru_cache(maxsize=64)  # keeps no graph that is gone, as an error is not kept
def _facts(graph: str) -> _Facts:
    from torch_xla_donate.hlo.dump import copied_bytes

    text = _C.graph_text(graph) if graph else None
    if text is None:
        raise LookupError(graph)
    module = hlo.parse(text)
    wrapped = len(module.parameters) == 1 and module.parameters[0].is_tuple

    def number(parameter: int, index: Sequence[int]) -> int:
        return index[0] if wrapped else parameter

    output_of = {
        number(alias.parameter_number, alias.parameter_index): alias.output_index[0] if alias.output_index else 0
        for alias in module.aliases
    }
    copied = {parameter: size for parameter, size in copied_bytes(text).items() if parameter in output_of}
    return _Facts(output_of, copied)


def describe_donors(raws: Iterable[_C._Donor], step: _C._Step | None, facts: _Facts | None = None) -> list[Donor]:
    """Donors of a step that has read them, or pending marks (without a step)."""
    sizes: StepSizes | None = None
    found = []
    for raw in raws:
        outcome: Outcome = "unusable"
        code: Reason | None = None
        output = into_kept = crossed = None
        requested, preferred, parameter = raw["requested"], raw["preferred_output"], raw["parameter"]
        if step is None:
            outcome, code, reason = "pending", Reason.UNREAD, "no step has read it yet"
        elif raw["outcome"] == "donated":
            outcome, reason = "donated", ""
            output = None if facts is None or parameter is None else facts.output_of.get(parameter)
        elif raw["reason"]:
            code, reason = Reason(raw["reason"].code), sentence(raw["reason"])
        else:
            sizes = sizes or StepSizes(step["outputs"], (one["size"] for one in step["donors"] if not one["reason"]))
            code, reason = sizes.explain(raw)
        if output is not None and preferred is not None:
            crossed = output != preferred
        if requested is not None and (output is not None or outcome == "unusable"):
            into_kept = output == requested
        dtype, _, shape = raw["shape"].rstrip("]").partition("[")
        found.append(
            Donor(
                name=raw["name"],
                where=raw["where"],
                shape=tuple(int(size) for size in shape.split(",") if size),
                dtype=dtype,
                bytes=raw["bytes"],
                bytes_per_device=raw["bytes_per_device"],
                sharding=split_sharding(raw["array"])[1],
                device=raw["device"],
                outcome=outcome,
                reason=reason,
                step=None if step is None else step["number"],
                into_kept=into_kept,
                automatic=raw["automatic"],
                output=output,
                crossed=crossed,
                parameter=parameter,
                reason_code=code,
            )
        )
    return found
