"""Draws docs/memory_truth.svg: the memory of a step that donation does not help."""

from __future__ import annotations

from pathlib import Path

import click
import matplotlib
import torch

import torch_xla_donate as txd
from torch_xla_donate import hlo

matplotlib.use("Agg")
from matplotlib import pyplot

FOLDER = Path(__file__).resolve().parent
PARTS = {"arguments": "#8c959f", "reused by outputs": "#2f81f7", "new outputs": "#d29922", "temporaries": "#a371f7"}


def square(w: torch.Tensor) -> torch.Tensor:
    """A product cannot be written over its own operand."""
    return w @ w


def parts(memory: hlo.MemoryAnalysis) -> list[float]:
    """The MiB of each part of a run."""
    reused = memory.alias_bytes
    bytes_ = [memory.argument_bytes - reused, reused, memory.output_bytes - reused, memory.temp_bytes]
    return [count / 2**20 for count in bytes_]


@click.command()
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=FOLDER.parent / "docs")
def main(output: Path) -> None:
    """Draws the figure of docs/performance.md."""
    lowered = txd.compile(square, donate_argnums=0).lower(txd.placeholder((1024, 1024), torch.float32))
    module = hlo.compile_for(lowered.as_text(), "cpu", undonated=True)
    assert module.undonated is not None
    bars = {"not donated": parts(module.undonated), "donated": parts(module.memory)}
    with pyplot.style.context(FOLDER / "figures.mplstyle"):
        figure, axes = pyplot.subplots(figsize=(5.2, 2.2), layout="constrained")
        left = [0.0] * len(bars)
        for number, (label, colour) in enumerate(PARTS.items()):
            widths = [values[number] for values in bars.values()]
            drawn = axes.barh(list(bars), widths, 0.62, left=left, color=colour, label=label)
            left = [start + width for start, width in zip(left, widths)]
        axes.bar_label(drawn, [f" {total:.1f} MiB" for total in left])
        axes.margins(x=0.22)
        axes.set_xlabel("MiB on a device during a run")
        figure.legend(frameon=False, ncols=2, loc="outside upper left")
        figure.savefig(output / "memory_truth.svg", transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
