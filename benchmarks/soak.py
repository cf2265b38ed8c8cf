"""Thousands of donating steps: memory and registry stay flat, one compilation, values right. Exits 1 otherwise."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import numpy as np
import torch

import torch_xla_donate
from torch_xla_donate import _C

SHAPE = (64, 16)
DECAY, RATE = 0.5, 0.25
# Steps before the slope counts: allocators and torch_xla's own metrics fill up first.
WARM_UP = 0.25
# A leak of one donor record a step would be some hundreds of bytes; a leaked buffer, 4 KiB.
BYTES_PER_STEP = 64
# Memory that the allocator may take at any time, for any number of steps.
SLACK = _common.MIB


def growth(memory: Sequence[tuple[int, int]]) -> float:
    """Bytes a step: the slope of a straight line through the samples (Theil-Sen, which a single jump does not tilt)."""
    slopes = [
        (later - earlier) / (second - first)
        for index, (first, earlier) in enumerate(memory)
        for second, later in memory[index + 1 :]
    ]
    return float(np.median(slopes)) if slopes else 0.0


class State:
    """A counter, weights with momentum, and a cache written row by row: what a training or decoding loop keeps."""

    def __init__(self) -> None:
        self.counter = torch.zeros(8, dtype=torch.int32).to("xla")
        self.weights = torch.ones(SHAPE).to("xla")
        self.momentum = torch.zeros(SHAPE).to("xla")
        self.gradient = torch.full(SHAPE, 0.5).to("xla")
        _common.step()

    def donated(self) -> list[torch.Tensor]:
        return [self.counter, self.weights, self.momentum]

    def step(self) -> list[torch.Tensor]:
        """One step; returns the tensors that it consumed."""
        old = self.donated()
        torch_xla_donate.donate_buffer({"counter": self.counter, "model": [self.weights, self.momentum]})
        self.counter = self.counter + 1
        self.momentum = self.momentum * DECAY + self.gradient
        # A weight that decays, so that it neither overflows nor stops changing before it has settled.
        self.weights = self.weights * (1 - RATE) + self.momentum * RATE
        _common.step()
        return old


def expected(steps: int) -> tuple[float, float]:
    """Weight and momentum after so many steps, in double precision."""
    weight, momentum = 1.0, 0.0
    for _ in range(steps):
        momentum = momentum * DECAY + 0.5
        weight = weight * (1 - RATE) + momentum * RATE
    return weight, momentum


def refused(old: Sequence[torch.Tensor]) -> bool:
    """Whether every consumed tensor says so, and refuses to be read."""
    for tensor in old:
        if not torch_xla_donate.is_donated(tensor):
            return False
        try:
            tensor.cpu()
        except torch_xla_donate.DonatedBufferError:
            continue
        return False
    return True


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    return {
        "all": _common.Table(
            f"soak: {result['options']['steps']:,} donating steps",
            (f"{result['options']['steps']:,} donating steps", "found", "at most"),
            [
                (
                    "growth of resident memory, bytes a step",
                    f"{result['bytes_per_step']:.1f}",
                    f"{result['bytes_per_step_allowed']:.1f}",
                ),
                (
                    "records in the registry",
                    *(str(sum(result[key].values())) for key in ("registry_at_end", "registry_after_warm_up")),
                ),
                ("compilations", str(result["compiles"]), "1"),
            ],
        )
    }


@click.command()
@click.option("--steps", default=20_000, show_default=True, type=click.IntRange(min=100))
@_common.results_option
def main(steps: int, results: Path) -> None:
    """Donates at every step, and checks that nothing grows."""
    state = State()
    compiled_before = _common.compiles()
    every = max(1, steps // 100)
    # Read where nothing of the step is left: sizes may differ within a step.
    memory: list[tuple[int, int]] = []
    sizes: list[dict[str, int]] = []
    failures: list[str] = []
    for index in range(1, steps + 1):
        old = state.step()
        if index % every == 0:
            if not refused(old):
                failures.append(f"step {index}: a donated tensor could still be read")
            del old
            memory.append((index, _common.resident()))
            sizes.append(dict(_C.sizes()))
    compiled = _common.compiles() - compiled_before

    report = torch_xla_donate.donation_report()
    if not report.donors or any(donor.outcome != "donated" for donor in report.donors):
        failures.append(f"not every donor of the last steps was donated:\n{report}")
    warm = int(len(memory) * WARM_UP)
    slope = growth(memory[warm:])
    window = memory[-1][0] - memory[warm][0]
    limit = BYTES_PER_STEP + SLACK / window
    if slope > limit:
        failures.append(f"resident memory grows by {slope:.1f} bytes a step; at most {limit:.1f} expected")
    first, last = sizes[warm], sizes[-1]
    most = {key: max(found[key] for found in sizes[warm:]) for key in first}
    if most != first:
        failures.append(f"the registry grows: {first} after the warm-up, at most {most} later")
    if compiled != 1:
        failures.append(f"{compiled} compilations in the loop, expected 1")
    wrong: list[str] = []
    weight, momentum = expected(steps)
    count = state.counter.cpu()
    if not torch.equal(count, torch.full_like(count, steps)):
        wrong.append(f"the counter is {count.tolist()}, expected {steps} everywhere")
    for name, tensor, value in (("weights", state.weights, weight), ("momentum", state.momentum, momentum)):
        if not torch.allclose(tensor.cpu(), torch.full(SHAPE, value), rtol=1e-5, atol=0):
            wrong.append(f"the {name} are {tensor.flatten()[:3].tolist()}, expected {value}")
    failures += wrong

    result = _common.describe("soak", {"steps": steps}, command=f"python benchmarks/soak.py --steps {steps}")
    result |= {
        "bytes_per_step": slope,
        "bytes_per_step_allowed": limit,
        "resident_change_bytes": memory[-1][1] - memory[warm][1],
        "registry_after_warm_up": first,
        "registry_at_end": last,
        "compiles": compiled,
        "failures": failures,
    }
    _common.finish(results, result, tables(result))
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
