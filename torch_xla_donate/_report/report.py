"""The report: the donors of the last steps with their outcome."""

from __future__ import annotations

import dataclasses
import html
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch_xla_donate import _C, _config
from torch_xla_donate._checks import check_count
from torch_xla_donate._errors import SWITCHED_OFF, see
from torch_xla_donate._report.donors import Donor, describe_donors, facts_of
from torch_xla_donate._report.holders import UNKNOWN, holders_of
from torch_xla_donate._report.notices import warn_or_raise
from torch_xla_donate._report.reasons import sentence
from torch_xla_donate._text import cut, percent, plural, size


@dataclasses.dataclass(frozen=True)
class HeldInput:
    """An input that an output could have reused, if a tensor or pending work did not hold it.

    Attributes:
        array: element type and shape in XLA's notation: ``f32[8,4]``.
        bytes: bytes of the whole array, before any sharding.
        device: such as ``CPU:0``.
        holder: the holder, if Python can find it when the report is made: ``variable 'old' at train.py:12``,
            ``grad_fn of variable 'loss' at train.py:9``, ``model.weight at train.py:5``, ``unknown holder``, or
            ``work that stays pending``.
    """

    array: str
    bytes: int
    device: str
    holder: str


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a report.

    Attributes:
        number: counted from 1 over steps with donors; None for a step without donors.
        donors: the number of its donors.
        crossed: the number of donors whose buffer went to another output than the one computed from them.
        copied_bytes: bytes of the donated buffers, tensors updated in place included, that XLA copies before it
            overwrites them; None if unknown, because the executable is gone or donated nothing.
        compilations: the number of graphs that torch_xla compiled in this process for this step: since the step
            before, and for the reads (``print``, ``.item()``) between this step and the next. The first step with
            donors of the process also counts the graphs of all steps and reads before it.
    """

    number: int | None
    donors: int = 0
    crossed: int = 0
    copied_bytes: int | None = None
    compilations: int = 0


@dataclasses.dataclass(frozen=True)
class DonationReport:
    """Outcome of every donor of the last steps, oldest first. The first step with donors begins the report.

    ``bool(report)`` is True if each step offered donors, and each of them was donated. Offered donors are all marked
    donors, and the automatic donors that an output reused.

    Attributes:
        donors: donors that a step has read.
        pending: marks that no step has read yet.
        auto_refusals: the number of steps in this process that `auto_donate` skipped, by reason.
        held: inputs that `auto_donate` skipped in the last step of each device, although an output could have reused
            them. Empty for a device whose last step ran without `auto_donate`.
        steps: a summary of each step.
        errors: the number of failures of the package's hooks in this process, by error. The step went on without
            donation, or without the check of `debug_nans`. Please report them.
    """

    donors: tuple[Donor, ...]
    pending: tuple[Donor, ...]
    auto_refusals: Mapping[str, int] = dataclasses.field(default_factory=dict)
    held: tuple[HeldInput, ...] = ()
    steps: tuple[Step, ...] = ()
    errors: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def crossed(self) -> int:
        """The number of donors whose buffer went to another output than the one computed from them."""
        return sum(step.crossed for step in self.steps)

    @property
    def compilations(self) -> int:
        """The number of graphs that torch_xla compiled for the reported steps."""
        return sum(step.compilations for step in self.steps)

    @property
    def copied_bytes(self) -> int:
        """Bytes of donated buffers that XLA copied before it overwrote them, as far as known."""
        return sum(step.copied_bytes or 0 for step in self.steps)

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donors whose memory an output reused."""
        return sum(donor.bytes for donor in self.donors if donor.outcome == "donated")

    @property
    def reused_fraction(self) -> float:
        """`donated_bytes` as a fraction of the bytes offered, times the share of steps with donors.

        It falls when a loop loses its donation. It is 0.0 if no donor was offered.
        """
        if not self.offered:
            return 0.0
        offered = sum(donor.bytes for donor in self.offered)
        fraction = self.donated_bytes / offered if offered else float(self._is_each_donated())
        with_donors = sum(step.number is not None for step in self.steps)
        share = with_donors / len(self.steps) if self.steps else 1.0
        return fraction * share

    def _is_each_donated(self) -> bool:
        # The bytes do not show it for arrays of size 0.
        return all(donor.outcome == "donated" for donor in self.offered)

    @property
    def offered(self) -> tuple[Donor, ...]:
        """All donors, except automatic ones that no output reused."""
        return tuple(donor for donor in self.donors if donor.outcome == "donated" or not donor.automatic)

    def __bool__(self) -> bool:
        return self.reused_fraction == 1.0 and self._is_each_donated()

    def __str__(self) -> str:
        """A line of summary, a row for each donor, and notes."""
        if _config.IS_OFF:
            return SWITCHED_OFF
        if not self.donors and not self.pending:
            first = "None of these steps had donors." if self.steps else "No step has had a donor yet."
            return "\n".join([first, *_notes(self)])
        from rich.table import Table

        from torch_xla_donate._report.console import render

        table = Table(title=_summary(self), title_justify="left")
        for column in _COLUMNS:
            table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
        # Unusable donors come first, so that thousands of donated ones do not hide them.
        donors = sorted((*self.donors, *self.pending), key=lambda donor: donor.outcome == "donated" or donor.automatic)
        for donor in donors[:_ROWS]:
            table.add_row(*_row(donor))
        more = [f"... and {len(donors) - _ROWS} more; see .to_dict()"] if len(donors) > _ROWS else []
        return "\n".join([render(table), *more, *_notes(self)])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"  # for notebooks

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for ``json.dumps``."""
        return {
            "complete": bool(self),
            "donors": [donor.to_dict() for donor in self.donors],
            "pending": [donor.to_dict() for donor in self.pending],
            "donated_bytes": self.donated_bytes,
            "reused_fraction": self.reused_fraction,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "crossed": self.crossed,
            "compilations": self.compilations,
            "copied_bytes": self.copied_bytes,
            "auto_refusals": dict(self.auto_refusals),
            "held": [dataclasses.asdict(held) for held in self.held],
            "errors": dict(self.errors),
        }


_KEPT = 8  # csrc/registry/steps.h keeps as many
_ROWS = 40
_COLUMNS = ("step", "donor", "array", "bytes", "in → out", "outcome", "reason")
_NUMBERS = ("step", "bytes", "in → out")


def _summary(found: DonationReport) -> str:
    """The first line of a report with donors."""
    used = sum(donor.outcome == "donated" for donor in found.donors)
    offered = sum(donor.bytes for donor in found.offered)
    text = (
        f"{used} of {len(found.offered)} donors donated, {size(found.donated_bytes)} "
        f"({percent(found.donated_bytes / max(offered, 1))} of the bytes offered)"
    )
    if len(found.donors) > len(found.offered):
        text += f"; {len(found.donors) - len(found.offered)} automatic not used"
    if found.pending:
        text += f"; {len(found.pending)} pending"
    return text


def _row(donor: Donor) -> tuple[str, ...]:
    place = "(auto)" if donor.automatic else donor.where.rpartition("/")[2]
    kept = {True: ", into kept", False: ", into not kept", None: ""}[donor.into_kept]
    source, target = ("" if number is None else str(number) for number in (donor.parameter, donor.output))
    return (
        "" if donor.step is None else str(donor.step),
        f"{donor.name} ({place})" if donor.name else place,
        f"{donor.array} {donor.sharding}".rstrip(),
        size(donor.bytes),
        f"{source} → {target}" if target else source,
        donor.outcome + kept + (", crossed" if donor.crossed else ""),
        donor.reason,
    )


def _notes(found: DonationReport) -> list[str]:
    """The lines of a report below its table."""
    texts = []
    plain = sum(step.number is None for step in found.steps)
    if plain:
        texts.append(f"{plain} of the last {len(found.steps)} steps had no donors.")
    compiled = sum(step.compilations > 0 for step in found.steps)
    if compiled > 1:
        texts.append(f"torch_xla compiled {found.compilations} graphs, at {compiled} of {len(found.steps)} steps.")
    if found.crossed:
        texts.append(
            f"{plural(found.crossed, 'donor')} crossed. XLA gave the memory to another output "
            "of the same size than the one computed from the donor most directly, so these values move at every step."
        )
    if found.copied_bytes:
        texts.append(
            f"XLA copied {size(found.copied_bytes)} of donated buffers in these steps before it wrote over them."
        )
    for reason, count in found.auto_refusals.items():
        texts.append(f"auto_donate skipped {plural(count, 'step')}: {reason}.")
    for error, count in found.errors.items():
        texts.append(f"A hook failed {plural(count, 'time')} and the step went on without it: {error}.")
    if found.held:
        text = "auto_donate skipped these inputs of the last step, which outputs could have reused:"
        alike = Counter((held.array, held.bytes, held.holder) for held in found.held)
        lines = [
            f"{count} x {array} ({size(bytes_)}): held by {holder}" for (array, bytes_, holder), count in alike.items()
        ]
        texts.append("\n  ".join([text, *cut(lines, _ROWS)]))
    return texts


def donation_report(*, steps: int | None = None) -> DonationReport:
    """The donors of the last steps with their outcome, and the pending marks.

    Waits until running steps have started on the device, which is when XLA takes the buffers. Does not wait for their
    results.

    Args:
        steps: the number of steps to look back, at most and by default 8. Steps without donors count from the first
            step with donors. Reads (``print``, ``.item()``, ``.cpu()``) do not count.

    Raises:
        TypeError: ``steps`` is not an int.
        ValueError: ``steps`` is not positive.
        DonationError: a strict donation was unusable, and no step has raised that yet.
    """
    if steps is not None:
        check_count("steps", steps, f"Pass 1 or more, or None. {see('report')}")
    _C.wait_for_steps()
    count = int(min(steps or _KEPT, _KEPT))
    last: list[tuple[_C._Step | None, int]] = []  # None for a step without donors; the number of compilations
    for with_donors in _C.steps(count):
        last.append((with_donors, with_donors["compilations"]))
        last += [(None, compilations) for compilations in with_donors["plain_steps"]]
    donors: list[Donor] = []
    summary: list[Step] = []
    for step, compilations in last[-count:]:
        if step is None:
            summary.append(Step(None, compilations=compilations))
            continue
        facts = facts_of(step)
        own = describe_donors(step["donors"], step, facts)
        crossed = sum(bool(donor.crossed) for donor in own)
        copied = None if facts is None else sum(facts.copied.values())
        summary.append(Step(step["number"], len(own), crossed, copied, compilations))
        donors += own
    pending = describe_donors(_C.pending(), None)
    warn_or_raise(everywhere=True)
    left_alone = _C.auto_held()
    holders = holders_of([raw.buffer for raw in left_alone if raw.by_tensor and raw.buffer])
    held = tuple(
        HeldInput(
            raw.array,
            _C.bytes_per_device(raw.array) or 0,
            raw.device,
            holders.get(raw.buffer, UNKNOWN) if raw.by_tensor else "work that stays pending",
        )
        for raw in left_alone
    )
    refusals: dict[str, int] = {}
    for reason, count in _C.auto_refusals():  # errors that differ only after the first line have one sentence
        refusals[sentence(reason)] = refusals.get(sentence(reason), 0) + count
    errors = _C.hook_errors()
    return DonationReport(tuple(donors), tuple(pending), refusals, held, tuple(summary), errors)


def reasons_by_buffer() -> list[tuple[int, str]]:
    """The buffer (as in `_C.identity`) and the reason of each unusable donor of the kept steps, the last ones first."""
    found: list[tuple[int, str]] = []
    for step in reversed(_C.steps()):
        unusable = [raw for raw in step["donors"] if raw["outcome"] == "unusable" and raw["buffer"]]
        found += zip((raw["buffer"] for raw in unusable), (one.reason for one in describe_donors(unusable, step)))
    return found
