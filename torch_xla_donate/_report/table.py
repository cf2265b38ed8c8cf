"""Renders reports as tables of rich."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.table import Table

from torch_xla_donate._report.units import percent, size

if TYPE_CHECKING:
    from torch_xla_donate._report.donors import Donor
    from torch_xla_donate._report.report import DonationReport

_ROWS = 40
NO_DONORS = "No step has had a donor yet."


def console(**options: Any) -> Console:
    """A console for tables. Names and paths may look like rich's markup, and are shown as they are."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def render(table: RenderableType, width: int = 120) -> str:
    """The table as text, without colours and trailing blanks."""
    out = io.StringIO()
    console(file=out, width=width, no_color=True, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


COLUMNS = ("step", "donor", "array", "bytes", "in → out", "outcome", "reason")
_NUMBERS = ("step", "bytes", "in → out")


def summary(found: DonationReport) -> str:
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


def rows(found: DonationReport) -> list[tuple[str, ...]]:
    """The cells of each donor. Unusable donors come first, so that thousands of donated ones do not hide them."""
    ordered = sorted((*found.donors, *found.pending), key=lambda donor: donor.outcome == "donated" or donor.automatic)
    return [_row(donor) for donor in ordered]


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


def notes(found: DonationReport) -> list[str]:
    """The lines of a report below its table."""
    texts = []
    lost = sum(step.number is None for step in found.steps)
    if lost:
        texts.append(f"{lost} of the last {len(found.steps)} steps had no donors.")
    compiled = sum(step.compilations > 0 for step in found.steps)
    if compiled > 1:
        texts.append(f"torch_xla compiled {found.compilations} graphs, at {compiled} of {len(found.steps)} steps.")
    if found.crossed:
        texts.append(
            f"{found.crossed} donor{'s' if found.crossed > 1 else ''} crossed. XLA gave the memory to another output "
            "of the same size than the one computed from the donor most directly, so these values move at every step."
        )
    if found.copied_bytes:
        texts.append(
            f"XLA copied {size(found.copied_bytes)} of donated buffers in these steps before it wrote over them."
        )
    for reason, count in found.auto_refusals.items():
        texts.append(f"auto_donate skipped {count} step{'s' if count > 1 else ''}: {reason}.")
    for error, count in found.errors.items():
        texts.append(f"A hook failed {count} time{'s' if count > 1 else ''} and the step went on without it: {error}.")
    if found.backward_threads:
        steps = "1 step" if found.backward_threads == 1 else f"{found.backward_threads} steps"
        texts.append(
            f"Before {steps} autograd ran on separate threads. Such a thread may still hold a gradient when a step "
            "begins,\nwhich makes it an output of that step. Run the backward pass under "
            "torch.autograd.set_multithreading_enabled(False)."
        )
    if found.held:
        text = "auto_donate skipped these inputs of the last step, which outputs could have reused:"
        alike = Counter((held.array, held.bytes, held.holder) for held in found.held)
        for (array, bytes_, holder), count in list(alike.items())[:_ROWS]:
            text += f"\n  {count} x {array} ({size(bytes_)}): held by {holder}"
        texts.append(text)
    return texts


def report(found: DonationReport) -> str:
    """The text of a report: a line of summary, a row for each donor, and notes."""
    if not found.donors and not found.pending:
        return "\n".join([NO_DONORS, *notes(found)])
    table = Table(title=summary(found), title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", overflow="fold")
    cells = rows(found)
    for row in cells[:_ROWS]:
        table.add_row(*row)
    more = [f"... and {len(cells) - _ROWS} more; see .to_dict()"] if len(cells) > _ROWS else []
    return "\n".join([render(table), *more, *notes(found)])
