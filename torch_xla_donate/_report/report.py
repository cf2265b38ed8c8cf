"""The report: the donors of the last steps with their outcome."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch_xla_donate import _C
from torch_xla_donate._errors import see
from torch_xla_donate._report import table
from torch_xla_donate._report.donors import Donor, describe_donor, facts_of
from torch_xla_donate._report.holders import UNKNOWN, holders_of
from torch_xla_donate._report.notices import warn_or_raise
from torch_xla_donate._report.pairs import resolve_pairs
from torch_xla_donate._report.predict import StepPrediction
from torch_xla_donate._report.reasons import sentence


@dataclasses.dataclass(frozen=True)
class HeldInput:
    """An input that an output could have taken over, had nobody held it.

    Attributes:
        array: element type and shape, as XLA writes them: ``f32[8,4]``.
        bytes: of the whole array, before any sharding.
        device: such as ``CPU:0``.
        holder: who holds it, as far as Python can tell when the report is made: ``variable 'old' at train.py:12``,
            ``grad_fn of variable 'loss' at train.py:9``, ``attribute 'weight' of variable 'model' at train.py:5``; or
            ``unknown holder``, or ``work that stays pending``.
    """

    array: str
    bytes: int
    device: str
    holder: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a report.

    Attributes:
        number: counted from 1 over steps that have donors; None for a step without.
        donors: how many it had.
        crossed: how many of them went to another output than the one computed from them.
        copied_bytes: of the donated buffers that XLA copies before it writes over them; None if unknown, as the
            executable is gone or donated nothing.
    """

    number: int | None
    donors: int = 0
    crossed: int = 0
    copied_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class DonationReport:
    """Outcome of every donor of the last steps, oldest first. The first step with donors begins the report.

    ``bool(report)`` is True if each step offered donors, and each of them was donated. Marked donors are offered, and
    automatic ones that an output has taken over; nobody has asked for those that were of no use.

    Attributes:
        donors: read by a step.
        pending: marked, and not read by any step yet.
        auto_refusals: how many steps of the process `auto_donate` has left alone, by reason; empty if none.
        held: what `auto_donate` has left alone in the last step of each device, although an output could have taken it;
            none of a device whose last step ran without `auto_donate`.
        backward_threads: how many of the reported steps with donors followed a backward pass on autograd's own threads.
            Such a thread may still hold gradients, which are outputs then. To avoid that, run the backward pass under
            ``torch.autograd.set_multithreading_enabled(False)``, or in `compile`.
        errors: how often a hook of the package has failed in this process and the step went on without donation or
            without the check of `debug_nans`, by error; empty if none has. Please report them.
    """

    donors: tuple[Donor, ...]
    pending: tuple[Donor, ...]
    auto_refusals: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held: tuple[HeldInput, ...] = ()
    steps: tuple[Step, ...] = ()
    backward_threads: int = 0
    errors: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def crossed(self) -> int:
        """How many donors went to another output than the one computed from them."""
        return sum(step.crossed for step in self.steps)

    @property
    def copied_bytes(self) -> int:
        """Bytes of donated buffers that XLA copied before it wrote over them, as far as it is known."""
        return sum(step.copied_bytes or 0 for step in self.steps)

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donors whose memory an output has taken over."""
        return sum(donor.bytes for donor in self.donors if donor.outcome == "donated")

    @property
    def reused_fraction(self) -> float:
        """`donated_bytes` as a fraction of the bytes offered, times the share of steps that had donors.

        So it falls when a loop loses its donation. 0.0 if no donor was offered.
        """
        offered = sum(donor.bytes for donor in self.offered)
        if not offered:
            return 0.0
        with_donors = sum(step.number is not None for step in self.steps)
        share = with_donors / len(self.steps) if self.steps else 1.0
        return self.donated_bytes / offered * share

    @property
    def offered(self) -> tuple[Donor, ...]:
        """The donors that count: all but the automatic ones that were of no use."""
        return tuple(donor for donor in self.donors if donor.outcome == "donated" or not donor.automatic)

    def __bool__(self) -> bool:
        return self.reused_fraction == 1.0

    def __str__(self) -> str:
        return table.report(self)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for ``json.dumps``."""
        return {
            "donors": [dataclasses.asdict(donor) for donor in self.donors],
            "pending": [dataclasses.asdict(donor) for donor in self.pending],
            "donated_bytes": self.donated_bytes,
            "reused_fraction": self.reused_fraction,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "crossed": self.crossed,
            "copied_bytes": self.copied_bytes,
            "auto_refusals": dict(self.auto_refusals),
            "held": [dataclasses.asdict(held) for held in self.held],
            "backward_threads": self.backward_threads,
            "errors": dict(self.errors),
        }


def donation_report(*, steps: int | None = None, predict: bool = False) -> DonationReport:
    """The donors of the last steps with their outcome, and the marks that are pending.

    Waits for running steps until they have been handed to the device, which is when XLA takes the buffers; not for the
    device to compute them.

    Args:
        steps: how many steps to look back, at most and by default 8. Steps without donors count from the first step
            with donors on; reads (``print``, ``.item()``, ``.cpu()``) do not.
        predict: whether to tell, for each pending mark, what the next step will do with it, from the bytes per device
            of marks and outputs. Looks at all pending work, so no other thread may be computing meanwhile. Nothing is
            compiled or run. What is seen from outside (dlpack, numpy) is not known; XLA copies it then.

    Raises:
        TypeError: ``steps`` is not an int.
        ValueError: ``steps`` is not positive.
        DonationError: a donation made with ``strict=True`` was unusable and has not been told before.
    """
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int)):
        raise TypeError(
            f"steps is of type {type(steps).__name__}, not an int. Pass 1 or more, or None. {see('report')}"
        )
    if steps is not None and steps < 1:
        raise ValueError(f"steps is {steps}. Pass 1 or more, or None. {see('report')}")
    _C.wait_for_steps()
    resolve_pairs(wait=True)
    found = _last_steps(min(steps or _KEPT, _KEPT))
    donors: list[Donor] = []
    summary: list[Step] = []
    for step in found:
        if step is None:
            summary.append(Step(None))
            continue
        facts = facts_of(step)
        own = [describe_donor(raw, step, facts=facts) for raw in step["donors"]]
        crossed = sum(bool(donor.crossed) for donor in own)
        summary.append(Step(step["number"], len(own), crossed, None if facts is None else sum(facts.copied.values())))
        donors += own
    marks = _C.pending()
    next_step = StepPrediction() if predict and marks else None
    pending = [describe_donor(raw, None, next_step) for raw in marks]
    warn_or_raise(everywhere=True)
    left_alone = _C.auto_held()
    holders = holders_of([raw.buffer for raw in left_alone if raw.by_tensor and raw.buffer])
    held = tuple(
        HeldInput(
            raw.array,
            raw.bytes,
            raw.device,
            holders.get(raw.buffer, UNKNOWN) if raw.by_tensor else "work that stays pending",
        )
        for raw in left_alone
    )
    refusals: dict[str, int] = {}
    for reason, count in _C.auto_refusals():  # of an error a sentence has the first line only
        refusals[sentence(reason)] = refusals.get(sentence(reason), 0) + count
    backward_threads = sum(step is not None and step["after_backward_thread"] for step in found)
    return DonationReport(
        tuple(donors),
        tuple(pending),
        refusals,
        held,
        tuple(summary),
        backward_threads,
        _C.hook_errors(),
    )


_KEPT = 8


def _last_steps(count: int) -> list[Mapping[str, Any] | None]:
    """The last steps, oldest first, from the first one with donors on; None stands for a step without donors."""
    with_donors = sorted(_C.steps(), key=lambda step: step["number"])  # they end in any order
    found: list[Mapping[str, Any] | None] = []
    for step, after in zip(with_donors, [*with_donors[1:], None]):
        plain_after = (_C.plain_steps() if after is None else after["plain_before"]) - step["plain_before"]
        found += [step, *[None] * min(plain_after, count)]
    return found[-count:]
