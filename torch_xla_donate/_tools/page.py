"""The report of a run as one HTML file without outside resources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_xla_donate._errors import see
from torch_xla_donate._report.units import percent, size
from torch_xla_donate._tools import pictures
from torch_xla_donate._tools.hints import NOTHING
from torch_xla_donate._tools.memory import findings
from torch_xla_donate._tools.summary import RunSummary, StepDonor, StepSummary
from torch_xla_donate.hlo import MemoryAnalysis

_FOLDER = Path(__file__).parent
_LOSSES = 10
_PICTURES = 40  # of the steps that take the most memory
_ROWS = 10_000  # of donors, shared evenly between the steps
_ROWS_OF_A_STEP = (10, 200)
_SKIPPED = 200
_OPEN = 5  # steps that are unfolded at first


class DonorRow(NamedTuple):
    """A donor, and the same donor on the topology."""

    here: StepDonor
    there: StepDonor | None

    @property
    def differs(self) -> bool:
        """Whether an output takes the memory on one of the two only."""
        return self.here.differs_from(self.there)


class Plan(NamedTuple):
    """A column of the table of a step's memory."""

    name: str
    memory: MemoryAnalysis


class StepView(NamedTuple):
    """A step as the page shows it. `number` counts from 1."""

    number: int
    step: StepSummary
    rows: Sequence[DonorRow]
    omitted: Sequence[DonorRow]
    findings: Sequence[str]
    plans: Sequence[Plan]
    pictures: Sequence[str]


def render(run: RunSummary) -> str:
    """The page: a summary, the timeline, and a section for each distinct step.

    Steps that take little memory have no picture, and steps with many donors omit some, those without loss first. The
    page says how many.

    Args:
        run: the steps of a program or of a dump.

    Raises:
        ImportError: matplotlib or Jinja2 is missing. The text names the extra to install.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            f'the page of a report needs Jinja2 ({error}). Install it with pip install "torch_xla_donate[report]". '
            f"{see('verify')}"
        ) from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(size=size, percent=percent)
    views = [_view(number, step, len(run.steps)) for number, step in enumerate(run.steps, 1)]
    drawn = _with_pictures(views)
    losses = [(view.number, donor) for view in views for donor in view.step.donors if donor.output is None]
    losses.sort(key=lambda loss: -loss[1].bytes)
    counted = {
        "donated": sum(view.step.donated_bytes for view in views),
        "offered": sum(view.step.offered_bytes for view in views),
        "executed": sum(view.step.executed or 0 for view in views),
        "donated_in_all": sum(view.step.donated_bytes * (view.step.executed or 0) for view in views),
    }
    both = [(step.memory, step.undonated) for step in run.steps if step.memory and step.undonated]
    peaks = [max(memory.peak_bytes for memory in plans) for plans in zip(*both)]
    return environment.get_template("page.html").render(
        run=run,
        views=drawn,
        pictured=sum(bool(view.pictures) for view in drawn),
        pictures_limit=_PICTURES,
        timeline=pictures.timeline_picture(run, prefix="t-") if run.timeline else "",
        losses=losses[:_LOSSES],
        more_losses=losses[_LOSSES:],
        skipped=run.skipped[:_SKIPPED],
        more_skipped=len(run.skipped[_SKIPPED:]),
        peaks=peaks,
        unfolded=_OPEN,
        nothing=NOTHING,
        **counted,
    )


def _view(number: int, step: StepSummary, steps: int) -> StepView:
    there = {donor.parameter: donor for donor in step.on_topology.donors} if step.on_topology else {}
    rows = [DonorRow(donor, there.get(donor.parameter)) for donor in step.donors]
    rows.sort(key=_importance)
    least, most = _ROWS_OF_A_STEP
    shown = min(max(_ROWS // steps, least), most)
    found = findings(step)
    if step.on_topology is not None:
        found += [f"On {step.on_topology.topology}: {sentence}" for sentence in findings(step.on_topology)]
    return StepView(number, step, rows[:shown], rows[shown:], found, _plans(step), ())


def _importance(row: DonorRow) -> tuple[bool, bool, bool, int]:
    """Losses first, then donors that differ on the topology or are copied, each from the largest on."""
    return row.here.output is not None, not row.differs, not row.here.copied_bytes, -row.here.bytes


def _plans(step: StepSummary) -> list[Plan]:
    """The columns of the table: on this machine, then on the topology."""
    plans = []
    for one in (step, step.on_topology):
        if one is not None:
            where = f"{one.topology}, " if one.topology else ""
            found = (("donated", one.memory), ("not donated", one.undonated))
            plans += [Plan(where + name, memory) for name, memory in found if memory is not None]
    return plans


def _with_pictures(views: Sequence[StepView]) -> list[StepView]:
    """The views; those that take the most memory with pictures."""
    largest = sorted((view for view in views if view.plans), key=_peak, reverse=True)[:_PICTURES]
    numbers = {view.number for view in largest}
    return [view._replace(pictures=_draw(view)) if view.number in numbers else view for view in views]


def _peak(view: StepView) -> int:
    return max(plan.memory.peak_bytes for plan in view.plans)


def _draw(view: StepView) -> list[str]:
    drawn: list[Any] = [("m", view.step), ("x", view.step.on_topology)]
    return [
        pictures.memory_picture(step, prefix=f"{letter}{view.number}-")
        for letter, step in drawn
        if step is not None and (step.memory or step.undonated)
    ]
