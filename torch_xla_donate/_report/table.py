"""Renders reports as tables of rich."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torch_xla_donate._report.report import DonationReport

_ROWS = 40


def render(table: Table, width: int = 120) -> str:
    """The table as text, without colours and trailing blanks."""
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def size(count: int) -> str:
    """Bytes with a unit: '1.5 MiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def percent(fraction: float) -> str:
    """A percentage. '100.0%' only for 1.0."""
    return f"{fraction if fraction >= 1 else min(fraction, 0.999):.1%}"


def report(found: DonationReport) -> str:
    """The text of a report: a line of summary, and a row for each donor."""
    skipped = "".join(
        f"\nauto_donate skipped {count} step{'s' if count > 1 else ''}: {reason}."
        for reason, count in found.auto_refusals.items()
    )
    skipped += "".join(
        f"\nA hook failed {count} time{'s' if count > 1 else ''} and the step went on without it: {error}."
        for error, count in found.errors.items()
    )
    if found.backward_threads:
        steps = "1 step" if found.backward_threads == 1 else f"{found.backward_threads} steps"
        skipped += (
            f"\nBefore {steps} autograd ran on separate threads. Such a thread may still hold a gradient when a step "
            "begins,\nwhich makes it an output of that step. Run the backward pass under "
            "torch.autograd.set_multithreading_enabled(False)."
        )
    if found.held:
        skipped += "\nauto_donate skipped these inputs of the last step, which outputs could have reused:"
        alike = Counter((held.array, held.bytes, held.holder) for held in found.held)
        for (array, bytes_, holder), count in list(alike.items())[:_ROWS]:
            skipped += f"\n  {count} x {array} ({size(bytes_)}): held by {holder}"
    if not found.donors and not found.pending:
        return "No step has had a donor yet." + skipped
    used = sum(donor.outcome == "donated" for donor in found.donors)
    offered = sum(donor.bytes for donor in found.offered)
    summary = (
        f"{used} of {len(found.offered)} donors donated, {size(found.donated_bytes)} "
        f"({percent(found.donated_bytes / max(offered, 1))} of the bytes offered)"
    )
    if len(found.donors) > len(found.offered):
        summary += f"; {len(found.donors) - len(found.offered)} automatic not used"
    if found.pending:
        summary += f"; {len(found.pending)} pending"
    table = Table(title=summary, title_justify="left")
    for column in ("step", "donor", "array", "bytes", "outcome", "reason"):
        table.add_column(column, justify="right" if column in ("step", "bytes") else "left", overflow="fold")
    # Unusable donors first, so that thousands of donated ones do not hide them.
    rows = sorted((*found.donors, *found.pending), key=lambda donor: donor.outcome == "donated" or donor.automatic)
    for donor in rows[:_ROWS]:
        place = "(auto)" if donor.automatic else donor.where.rpartition("/")[2]
        kept = {True: ", into kept", False: ", into not kept", None: ""}[donor.into_kept]
        table.add_row(
            "" if donor.step is None else str(donor.step),
            f"{donor.name} ({place})" if donor.name else place,
            f"{donor.array} {donor.sharding}".rstrip(),
            size(donor.bytes),
            donor.outcome + kept + (", crossed" if donor.crossed else ""),
            donor.reason,
        )
    text = render(table)
    if len(rows) > _ROWS:
        text += f"\n... and {len(rows) - _ROWS} more; see .to_dict()"
    lost = sum(step.number is None for step in found.steps)
    if lost:
        text += f"\n{lost} of the last {len(found.steps)} steps had no donors."
    if found.crossed:
        text += (
            f"\n{found.crossed} donors crossed. XLA gave their memory to an output of the same size that is not "
            "computed from them, so these values move at every step."
        )
    if found.copied_bytes:
        text += f"\nXLA copied {size(found.copied_bytes)} of donated buffers in these steps before it wrote over them."
    return text + skipped
