"""Draws docs/memory_truth.svg and docs/live_bytes.svg: what donation does to the memory of a step, and of a loop."""

from __future__ import annotations

from pathlib import Path

import click
import torch
import torch_xla

import torch_xla_donate as txd
from torch_xla_donate._tools import memory, pictures
from torch_xla_donate._tools.summary import Moment, RunSummary, StepSummary

DOCS = Path(__file__).resolve().parent.parent / "docs"
ROWS, PARAMETERS, RUNS = 512, 4, 16


def square(w: torch.Tensor) -> torch.Tensor:
    """The step of docs/performance.md that donation does not help."""
    return w @ w


def update(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """The step of the loop."""
    return [0.9 * w for w in weights]


def planned(function, *arguments) -> StepSummary:
    """The memory of a function that donates its first argument."""
    lowered = txd.compile(function, donate_argnums=0).lower(*arguments)
    step = StepSummary(function.__name__, "", 1, 1, (), 1)
    return memory.with_undonated(step, lowered.as_text())


def loop_moments(step: StepSummary) -> list[Moment]:
    """Runs the loop, which donates from its middle on. Its state is all that is alive before a run."""
    plain = StepSummary(step.module, "", 1, 1, (), 0, memory=step.undonated)
    weights = [torch.ones(ROWS, ROWS).to("xla") for _ in range(PARAMETERS)]
    torch_xla.sync()
    moments = []
    for number in range(RUNS):
        donates = number >= RUNS // 2
        live = sum(w.nbytes for w in weights)
        if donates:
            txd.donate_buffer(weights)
        weights = update(weights)
        torch_xla.sync(wait=True)
        assert bool(txd.donation_report(steps=1)) == donates
        moments.append(memory.moment(int(donates), step if donates else plain, live))
    return moments


@click.command()
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), default=DOCS)
def main(output: Path) -> None:
    """Draws the figures of docs/performance.md."""
    step = planned(square, txd.placeholder((1024, 1024), torch.float32))
    (output / "memory_truth.svg").write_text(pictures.memory_picture(step), encoding="utf-8")
    loop = planned(update, [txd.placeholder((ROWS, ROWS), torch.float32) for _ in range(PARAMETERS)])
    run = RunSummary("loop", (loop,), tuple(loop_moments(loop)))
    (output / "live_bytes.svg").write_text(pictures.timeline_picture(run), encoding="utf-8")


if __name__ == "__main__":
    main()
