"""expect_donated: raises if the steps of a block reused too little of the memory that they were offered."""

from __future__ import annotations

from torch_xla_donate import _C, _config, _report
from torch_xla_donate._checks import check_fraction
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._modes.context import ThreadMode
from torch_xla_donate._text import percent


class expect_donated(ThreadMode[_C.StepTally]):
    """The steps of this thread inside the context have at least this `reused_fraction`, or its end raises.

    It counts all steps that begin inside, beyond those that `donation_report` keeps, and no others. The end waits until
    they have started on the device, which is when XLA takes the buffers. It does not wait for their results. Steps of
    other threads do not count; each thread may have its own context. It also works as a decorator of a function.

    Donors are those of `donate_buffer`, of `compile`, and the automatic ones that an output reused. The fraction is
    `DonationReport.reused_fraction` of these steps: the share of the bytes offered that outputs reused, times the share
    of steps with donors, from the first step with donors on. An exception of the block is raised as it is, without this
    check.

    Args:
        min_fraction: above 0, at most 1.

    Raises:
        TypeError: ``min_fraction`` is not a number, or the decorated function is a generator or ``async def`` function.
        ValueError: ``min_fraction`` is out of range.
        DonationError: at the end of the context, if the steps reused less, or if no step offered a donor.
    """

    def __init__(self, min_fraction: float = 0.95) -> None:
        check_fraction("min_fraction", min_fraction)
        super().__init__(_C.StepTally, lambda tally: tally.open(all_threads=False), _C.StepTally.close)
        self._min_fraction = min_fraction

    def finish(self) -> None:
        if _config.IS_OFF:  # nothing is donated
            return
        _C.wait_for_steps()
        _report.raise_with_notices(self._failure(self.last_entry().read()))

    def _failure(self, found: _C._Tally) -> DonationError | None:
        steps, plain = found["steps"], found["plain_steps"]
        if not found["offered_bytes"]:
            return DonationError(
                "expect_donated: no donor was offered in the steps of this block. Run at least one step that donates, "
                f"on the thread that entered the block. {see('testing')}"
            )
        reused = found["donated_bytes"] / found["offered_bytes"]
        fraction = reused * steps / (steps + plain)
        if fraction >= self._min_fraction:
            return None
        lines = [
            f"expect_donated: the reused_fraction of this block is {percent(fraction)}, and min_fraction is "
            f"{self._min_fraction}. Outputs reused {percent(reused)} of the bytes offered "
            f"({found['donated_bytes']} of {found['offered_bytes']}), and {steps} of {steps + plain} steps had donors. "
            f"Donate in each step what an output can reuse, or lower min_fraction. {see('testing')}"
        ]
        lines += [text for step in found["unusable"] for text in _report.unusable_texts(step)]
        if not found["unusable"] and found["donated_bytes"] < found["offered_bytes"]:
            lines.append("These steps failed, or ran inside donation_disabled() or debug_nans().")
        return DonationError("\n".join(lines))
