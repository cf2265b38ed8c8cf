"""Draws docs/benchmarks.svg from the result files. `make bench` calls it; it measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

FOLDER = Path(__file__).resolve().parent
FIGURE = FOLDER.parent / "docs" / "benchmarks.svg"
INK = "#7d8590"  # readable on a light and on a dark page
PLAIN, DONATED = "#9aa4af", "#2f81f7"
STYLE = FOLDER / "figures.mplstyle"


def read(results: Path, name: str) -> dict[str, Any]:
    """A result file.

    Raises:
        click.ClickException: there is none.
    """
    path = results / f"{name}.json"
    if not path.exists():
        raise click.ClickException(f"{path} is missing. Run `python benchmarks/{name}.py` first.")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def draw_update(memory: Any, time: Any, rows: list[dict[str, Any]]) -> None:
    """Peak memory and time of functional SGD, with and without donation."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for axes, title, value in (
        (memory, "Functional SGD: peak / live bytes", lambda row: row["peak_over_live_nothing_kept_back"]),
        (time, "Functional SGD: time of a step", lambda row: row["time"]["median"]),
    ):
        for shift, variant, colour in ((-0.2, "not_donated", PLAIN), (0.2, "donated", DONATED)):
            values = [value(row) for row in rows if row["variant"] == variant]
            places = [place + shift for place in range(len(cases))]
            bars = axes.bar(places, values, 0.38, color=colour, label=variant.replace("_", " "))
            axes.bar_label(bars, fmt="%.2f", color=INK)
        axes.set_title(title, loc="left")
        axes.set_xticks(range(len(cases)), cases)
        axes.margins(y=0.15)
    memory.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0, 1.0))
    memory.margins(y=0.35)
    time.set_ylabel("not donated = 1")


def draw_overhead(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A step with nothing marked, with the hooks against without: medians and 95% intervals."""
    names = [f"{row['parameters']:,}" for row in rows]
    medians = [100 * (row["wall"]["median"] - 1) for row in rows]
    below = [100 * (row["wall"]["median"] - row["wall"]["low"]) for row in rows]
    above = [100 * (row["wall"]["high"] - row["wall"]["median"]) for row in rows]
    axes.errorbar(names, medians, yerr=(below, above), fmt="o", color=DONATED, capsize=4)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.margins(x=0.2)
    axes.set_title("Nothing marked: time added by the hooks [%]", loc="left")
    axes.set_xlabel("parameters of the step")


def draw_automatic(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Instructions that auto_donate adds for each live tensor, on top of torch_xla's own."""
    rows = [row for row in rows if not row["read_before"]]
    names = [f"{row['live']:,}" for row in rows]
    host = [row["by_torch_xla"] for row in rows]
    axes.bar(names, host, 0.5, color=PLAIN, label="torch_xla")
    bars = axes.bar(names, [row["for_each"] for row in rows], 0.5, bottom=host, color=DONATED, label="auto_donate")
    axes.bar_label(bars, [f"+{row['for_each']:.0f}" for row in rows], color=INK)
    axes.set_title("Instructions for each live tensor of a step", loc="left")
    axes.set_xlabel("live tensors")
    axes.margins(y=0.3)
    axes.legend(frameon=False, ncols=2, loc="upper left")


def draw(results: Path, path: Path) -> None:
    """Draws the figure of these results."""
    with pyplot.style.context(STYLE):
        figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.2), layout="constrained")
        draw_update(axes[0][0], axes[0][1], read(results, "peak_memory")["rows"])
        draw_overhead(axes[1][0], read(results, "step_overhead")["nothing_marked"])
        draw_automatic(axes[1][1], read(results, "auto_instructions")["live_tensors"])
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


@click.command()
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=FOLDER / "results")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=FIGURE)
def main(results: Path, output: Path) -> None:
    """Draws the figure of docs/benchmarks.md."""
    draw(results, output)


if __name__ == "__main__":
    main()
