"""Peak memory and time of functional SGD updates: not donated, donated, in place; each in a separate process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import torch

import torch_xla_donate

VARIANTS = ("not_donated", "donated", "in_place")
# Tensors, floats of each.
CASES = {"1 x 256 MiB": (1, 1 << 26), "64 x 4 MiB": (64, 1 << 20), "1,000 x 64 KiB": (1_000, 1 << 14)}
TINY_CASES = {"2 x 4 KiB": (2, 1 << 10)}
RATE = 0.125


def worker(variant: str, count: int, floats: int) -> None:
    """Runs as many steps as each line of standard input says; answers with seconds a step, or memory at the end."""

    def arrays(value: float) -> list[torch.Tensor]:
        made = [torch.full((floats,), value).to("xla") for _ in range(count)]
        _common.step()
        return made

    weights: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []

    def step() -> None:
        if variant == "in_place":
            for weight, gradient in zip(weights, gradients):
                weight.sub_(gradient * RATE)
        else:
            if variant == "donated":
                torch_xla_donate.donate_buffer(weights)
            weights[:] = [weight - gradient * RATE for weight, gradient in zip(weights, gradients)]
        _common.step()

    def start() -> None:
        weights[:], gradients[:] = arrays(1.0), arrays(0.5)
        for _ in range(3):
            step()

    # Everything but the arrays is there after this, the executable included: that is the baseline.
    start()
    weights.clear()
    gradients.clear()
    _common.step()
    _common.trim()
    baseline = _common.resident()

    start()
    _common.trim()
    _common.forget_peak()
    done = 3
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        steps = int(line)

        def run(steps: int = steps) -> None:
            for _ in range(steps):
                step()

        seconds = _common.wall(run) / steps
        done += steps
        print(json.dumps(seconds), flush=True)
    peak = _common.resident_peak()
    expected = 1.0 - 0.5 * RATE * done
    for weight in (weights[0], weights[-1]):
        found = weight[:4].cpu()
        if not torch.equal(found, torch.full((4,), expected)):
            raise AssertionError(f"{variant}: weights are {found.tolist()} after {done} steps, expected {expected}")
    live = 2 * count * floats * 4
    print(json.dumps({"live": live, "peak": peak - baseline}), flush=True)


def take_turns(
    count: int, floats: int, rounds: int, repeat: int, environment: Mapping[str, str]
) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Seconds a step, and memory, of each variant: all processes are alive, one at a time runs."""
    workers: dict[str, _common.Worker] = {}
    try:
        for variant in VARIANTS:
            options = ["--worker", variant, "--count", str(count), "--floats", str(floats)]
            workers[variant] = _common.Worker(variant, [__file__, *options], environment)
            workers[variant].answer()

        def turn(found: _common.Worker) -> Callable[[], float]:
            return lambda: float(found.steps(repeat))

        seconds = _common.side_by_side({variant: turn(found) for variant, found in workers.items()}, rounds)
        return seconds, {variant: found.memory() for variant, found in workers.items()}
    finally:
        for found in workers.values():
            found.stop()


def measure(case: str, count: int, floats: int, rounds: int, repeat: int) -> list[dict[str, Any]]:
    """Time and memory as a user has them, and memory without what the allocator keeps back."""
    seconds, memory = take_turns(count, floats, rounds, repeat, {})
    _, exact = take_turns(count, floats, 2, repeat, _common.EXACT)
    return [
        {
            "case": case,
            "variant": variant,
            "live_bytes": memory[variant]["live"],
            "peak_over_live": memory[variant]["peak"] / memory[variant]["live"],
            "peak_over_live_nothing_kept_back": exact[variant]["peak"] / exact[variant]["live"],
            "time": _common.ratio(seconds[variant], seconds["not_donated"]),
        }
        for variant in VARIANTS
    ]


@click.command()
@_common.tiny_option
@_common.results_option
@click.option("--worker", "variant", type=click.Choice(VARIANTS), hidden=True)
@click.option("--count", type=int, default=1, hidden=True)
@click.option("--floats", type=int, default=1, hidden=True)
def main(tiny: bool, results: Path, variant: str | None, count: int, floats: int) -> None:
    """Peak memory and time of functional updates."""
    if variant is not None:
        worker(variant, count, floats)
        return
    rows = []
    for case, (tensors, size) in (TINY_CASES if tiny else CASES).items():
        rows += measure(case, tensors, size, *((2, 2) if tiny else (25, 3)))
    result = _common.describe("peak_memory", "python benchmarks/peak_memory.py", {"tiny": tiny})
    result["live"] = "weights and gradients"
    result["rows"] = rows
    _common.finish(
        results,
        result,
        _common.table_of(
            "peak_memory: SGD, w - rate * g, for every tensor",
            ("weights", "update", "peak / live bytes", "nothing kept back", "time of a step / not donated (95%)"),
            [
                (
                    row["case"],
                    row["variant"].replace("_", " "),
                    f"{row['peak_over_live']:.2f}",
                    f"{row['peak_over_live_nothing_kept_back']:.2f}",
                    _common.shown(row["time"]) if row["variant"] != "not_donated" else "1",
                )
                for row in rows
            ],
            "Live: weights and gradients. Peak: resident memory less what the process has without arrays. "
            f"Nothing kept back: the same with {next(iter(_common.EXACT))} set: freed arrays leave the process.",
        ),
    )


if __name__ == "__main__":
    main()
