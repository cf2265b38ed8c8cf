"""Predicts the outcome of the pending marks before the next step is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch_xla

from torch_xla_donate import _C, _host
from torch_xla_donate._report.explain import Explanation, StepSizes
from torch_xla_donate._report.reasons import SENTENCES, Reason, no_donation, sentence

Prediction = Literal["donated", "unusable", "unknown"]


class StepPrediction:
    """A look at the device's pending work, as a step of this thread would run it now.

    XLA gives a donor to an output of the same bytes on each device, and pairs those of equal bytes in their order.
    Under SPMD the compiler chooses the shardings that the program does not give. An output with such a sharding may
    have any size from one device's share to the whole array. The outcome of a donor that fits only such an output is
    ``unknown``.
    """

    def __init__(self) -> None:
        look = _look_ahead()
        self._off = no_donation()
        self._shared: frozenset[int] = frozenset(look["shared"])
        self._complete = look["complete"]
        spmd = bool(_host.runtime().is_spmd())
        self._known = [text for text in look["outputs"] if text and (not spmd or " sharding=" in text)]
        self._unknown = [text for text in look["outputs"] if text not in self._known]
        # In the order of the step's parameters.
        inputs = [(buffer, size) for buffer, size in look["inputs"] if buffer not in self._shared]
        self._sizes = dict(inputs)
        self._read = {buffer for buffer, _ in look["inputs"]}
        free = _C.FreeOutputs([_C.size_on_device(text) for text in self._known])
        self._paired = StepSizes(self._known, self._sizes.values())
        self._used = {buffer for buffer, size in inputs if free.take(size)}

    def predict(self, raw: Mapping[str, Any]) -> tuple[Prediction | None, Explanation]:
        """The outcome of a pending mark, and its reason; None if no pending work reads it."""
        buffer = raw["buffer"]
        if buffer not in self._read and self._complete:
            return None, Explanation(Reason.UNREAD, "no pending work reads it")
        if self._off:
            return "unusable", Explanation(Reason(self._off.code), sentence(self._off))
        if buffer in self._shared:
            return "unusable", Explanation(Reason.HELD_BY_OTHERS, SENTENCES[Reason.HELD_BY_OTHERS])
        if not self._complete:
            why = "functionalization is off, so the pending work of views is not known"
            return "unknown", Explanation(Reason.UNREAD, why)
        if buffer in self._used:
            return "donated", Explanation(Reason.UNREAD, "the next one will donate it")
        open_outputs = [text for text in self._unknown if self._may_fit(text, self._sizes[buffer])]
        if open_outputs:
            shown = ", ".join(open_outputs[:3]) + (", ..." if len(open_outputs) > 3 else "")
            return "unknown", Explanation(Reason.UNREAD, f"the compiler will choose the sharding of {shown}")
        return "unusable", self._paired.explain(raw)

    def _may_fit(self, output: str, size: int | None) -> bool:
        least, most = _C.bytes_per_device(output), _C.size_on_device(output)
        if least is None or most is None or size is None:
            return True
        return -(-least // _host.device_count()) <= size <= most


def _look_ahead() -> Any:
    sharding_of, probe = None, torch.zeros(1, device="cpu").to(torch_xla.device())
    if _host.runtime().is_spmd():

        def sharding_of() -> str:
            return _host.sharding_spec(probe)

    _host.list_live_tensors()
    return _C.look_ahead(probe, sharding_of)
