"""Pictures of a step's memory and of a run, as SVG. Equal data give equal text."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from torch_xla_donate._errors import see
from torch_xla_donate._report.units import size
from torch_xla_donate._tools.summary import Moment, RunSummary, StepSummary

STYLE = "torch_xla_donate._tools.figures"  # figures.mplstyle in this folder
MOMENTS = 400  # points of a timeline; longer runs are drawn as the largest value of each group
# Each colour in the drawing, with what a light and a dark page show in its place.
_COLOURS = {
    "#7d8590": ("ink", "#1f2328", "#e6edf3"),
    "#8c959f": ("kept", "#8c959f", "#8b949e"),
    "#2f81f7": ("aliased", "#0969da", "#58a6ff"),
    "#d29922": ("new", "#d4a72c", "#d29922"),
    "#a371f7": ("temporary", "#8250df", "#a371f7"),
}
_INK, _KEPT, _ALIASED, _NEW, _TEMPORARY = _COLOURS
_ID = re.compile(r'\b(id="|xlink:href="#|url\(#)')
_METADATA = re.compile(r" *<metadata>.*?</metadata>\n", re.DOTALL)


def memory_picture(step: StepSummary, *, prefix: str = "") -> str:
    """The bytes of a run of a step on one device, with and without donation, as bars.

    Args:
        step: a step with `memory`. Without `undonated` the picture has one bar.
        prefix: goes before each id in the SVG, so that several can be in one page.

    Raises:
        ValueError: the memory of the step is unknown.
        ImportError: matplotlib is missing.
    """
    plans = [("donated", step.memory), ("not donated", step.undonated)]
    bars = [(name, memory) for name, memory in plans if memory is not None]
    if not bars:
        raise ValueError(
            f"step {step.module} has no memory to draw. Give a step whose memory is known. {see('verify')}"
        )
    unit, name = _unit(max(memory.peak_bytes for _, memory in bars))
    parts = [
        ("arguments", _KEPT, [memory.argument_bytes - memory.alias_bytes for _, memory in bars]),
        ("reused by outputs", _ALIASED, [memory.alias_bytes for _, memory in bars]),
        ("new outputs", _NEW, [memory.output_bytes - memory.alias_bytes for _, memory in bars]),
        ("temporaries", _TEMPORARY, [memory.temp_bytes for _, memory in bars]),
    ]
    with _style():
        figure, axes = _figure(1.35 + 0.42 * len(bars))
        left = [0.0] * len(bars)
        places = list(range(len(bars)))[::-1]
        for label, colour, values in parts:
            widths = [value / unit for value in values]
            drawn = axes.barh(places, widths, 0.62, left=left, color=colour, label=label)
            left = [start + width for start, width in zip(left, widths)]
        axes.bar_label(drawn, [f" {size(memory.peak_bytes)}" for _, memory in bars])
        axes.set_yticks(places, [label for label, _ in bars])
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.22)
        axes.set_xlabel(f"{name} on a device during a run")
        figure.legend(frameon=False, ncols=2, loc="outside upper left")
        peaks = ", ".join(f"{label} {size(memory.peak_bytes)}" for label, memory in bars)
        return _svg(figure, f"Memory of a run of {step.module}: {peaks}", prefix)


def timeline_picture(run: RunSummary, *, prefix: str = "") -> str:
    """The live bytes on one device before each run of a step, and the bytes during the run.

    Args:
        run: a run with a `timeline`.
        prefix: as for `memory_picture`.

    Raises:
        ValueError: the timeline is empty.
        ImportError: matplotlib is missing.
    """
    if not run.timeline:
        raise ValueError(f"the timeline of {run.source!r} is empty. Give a run of a program. {see('verify')}")
    numbers, moments = _thinned(run.timeline)
    unit, name = _unit(max(moment.peak_bytes for moment in moments))
    with _style():
        figure, axes = _figure(2.6)
        live = [moment.live_bytes / unit for moment in moments]
        peak = [moment.peak_bytes / unit for moment in moments]
        # A last point gives the last run a width.
        edges = [*numbers, len(run.timeline) + 1]
        axes.stairs(live, edges, fill=True, color=_KEPT, label="live before the run")
        axes.stairs(peak, edges, baseline=live, fill=True, color=_TEMPORARY, label="added by the run")
        axes.set_xlim(1, edges[-1])
        axes.set_ylim(0, max(peak) * 1.05 or 1)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("runs of steps, in their order")
        axes.set_ylabel(f"{name} on a device")
        figure.legend(frameon=False, ncols=2, loc="outside upper left")
        highest = max(moment.peak_bytes for moment in moments)
        title = f"Live bytes of {len(run.timeline)} runs of steps, at most {size(highest)} during a run"
        return _svg(figure, title, prefix)


def _thinned(timeline: Sequence[Moment]) -> tuple[list[int], list[Moment]]:
    """At most `MOMENTS` numbers of runs, with the largest bytes from there to the next."""
    group = -(-len(timeline) // MOMENTS)
    starts = range(0, len(timeline), group)
    groups = [timeline[start : start + group] for start in starts]
    largest = [Moment(0, max(m.live_bytes for m in part), max(m.peak_bytes for m in part)) for part in groups]
    return [start + 1 for start in starts], largest


def _unit(largest: int) -> tuple[int, str]:
    names = ["bytes", "KiB", "MiB", "GiB"]
    power = min(max(largest.bit_length() - 1, 0) // 10, len(names) - 1)
    return 1 << 10 * power, names[power]


def _style() -> Any:
    try:
        import matplotlib.style
    except ImportError as error:
        raise ImportError(
            f"the pictures of a report need matplotlib ({error}). Install it with "
            f'pip install "torch_xla_donate[report]". {see("verify")}'
        ) from None
    return matplotlib.style.context([STYLE, {"font.size": 11}])


def _figure(height: float) -> tuple[Any, Any]:
    """A figure that is legible at the width of a telephone. pyplot would change the program's backend."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Any, title: str, prefix: str) -> str:
    """The figure as an SVG element that follows the page's colour scheme."""
    out = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Format": None, "Type": None, "Title": title}
    figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    _, _, text = out.getvalue().partition("<svg ")
    for colour, (name, *_) in _COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    text = _ID.sub(rf"\g<1>{prefix}", _METADATA.sub("", text))
    return f'<svg role="img" {_with_styles(text)}'.strip() + "\n"


def _with_styles(text: str) -> str:
    """The SVG with the colours of both schemes after its title."""
    light, dark = (" ".join(f"--{name}: {shades[scheme]};" for name, *shades in _COLOURS.values()) for scheme in (0, 1))
    style = f"svg {{ {light} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}"
    return text.replace("</title>", f"</title>\n <style>{style}</style>", 1)
