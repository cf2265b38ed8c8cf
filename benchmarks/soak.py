"""Thousands of mixed steps on eight devices: memory, registry and compilations stay flat, values right. Else exits 1.

A thread for each device repeats a cycle of steps, one of each kind of `KINDS`. All threads wait for each other when
memory and registry are read. Each step has to show what it is here for, so a soak in which nothing donates, or nothing
fails, is a failure, too.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import numpy as np
import torch
import torch_xla

import torch_xla_donate
from torch_xla_donate import _C

SHAPE = (64, 16)
DECAY, RATE = 0.5, 0.25
# Steps before the slope counts: the allocators of the threads and torch_xla's own metrics fill up first, which takes
# 3,000 steps on each device. The memory then stays the same to the page.
WARM_UP = 0.5
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


def step() -> None:
    # Not `_common.step`, which waits for all devices and raises the failure of another one.
    torch_xla.sync(wait=True)


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def updated(counter: torch.Tensor, weights: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor) -> State:
    momentum = momentum * DECAY + gradient
    # A weight that decays, so that it neither overflows nor stops changing before it has settled.
    return counter + 1, weights * (1 - RATE) + momentum * RATE, momentum


def expected(updates: int) -> tuple[float, float]:
    """Weight and momentum after so many updates, in double precision."""
    weight, momentum = 1.0, 0.0
    for _ in range(updates):
        momentum = momentum * DECAY + 0.5
        weight = weight * (1 - RATE) + momentum * RATE
    return weight, momentum


def refused(old: Sequence[torch.Tensor]) -> bool:
    """Whether every tensor is consumed, says so, and refuses to be read."""
    for tensor in old:
        if not torch_xla_donate.is_donated(tensor):
            return False
        try:
            tensor.cpu()
        except torch_xla_donate.DonatedBufferError:
            continue
        return False
    return True


class Loop:
    """The steps of one device, on one thread. Each method is a step, and returns whether it did what it is for."""

    def __init__(self, device: int) -> None:
        self.device = torch_xla.device(device)
        self.lazy = torch_xla_donate.compile(updated, donate_argnums=(0, 1, 2))
        self.pure = torch_xla_donate.compile(updated, donate_argnums=(0, 1, 2), pure=True)
        self.state: State = (
            torch.zeros(8, dtype=torch.int32).to(self.device),
            torch.ones(SHAPE).to(self.device),
            torch.zeros(SHAPE).to(self.device),
        )
        self.gradient = torch.full(SHAPE, 0.5).to(self.device)
        self.raised = 0  # stock torch_xla loses about 1 of 100 failures if several devices fail at once
        self.spare = torch.ones(8).to(self.device)
        step()

    def marked(self) -> bool:
        old = self.state
        counter, weights, momentum = old
        torch_xla_donate.donate_buffer({"counter": counter, "model": [weights, momentum]})
        self.state = updated(*old, self.gradient)
        step()
        return refused(old)

    def automatic(self) -> bool:
        try:
            with torch_xla_donate.auto_donate(), torch_xla_donate.expect_donated(0.9):
                self.state = updated(*self.state, self.gradient)
                step()
        except torch_xla_donate.DonationError:
            return False
        return True

    def read_between(self) -> bool:
        """A read between the mark and the step runs a part of the graph, and leaves the mark pending."""
        old = self.state
        torch_xla_donate.donate_buffer(old)
        self.state = updated(*old, self.gradient)
        count = int((self.state[0] * 2).sum())
        was_pending = not any(map(torch_xla_donate.is_donated, old)) and count > 0
        step()
        return was_pending and refused(old)

    def compiled(self) -> bool:
        old = self.state
        self.state = self.lazy(*old, self.gradient)
        return refused(old)

    def replayed(self) -> bool:
        old = self.state
        self.state = self.pure(*old, self.gradient)
        return refused(old)

    def fails_on_the_device(self) -> bool:
        torch_xla_donate.donate_buffer(self.spare, strict="off")
        # More memory than any machine has.
        broken: torch.Tensor | None = self.spare.reshape(8, 1, 1, 1).expand(8, 1 << 20, 1 << 20, 1 << 10) + 1
        for _ in range(2):  # torch_xla may report the failure once more
            try:
                step()
            except RuntimeError as error:
                self.raised += "memory" in str(error)
            broken = None
        del broken
        return not torch_xla_donate.is_donated(self.spare)

    def is_refused(self) -> bool:
        torch_xla_donate.donate_buffer(self.spare, strict="error")
        total = self.spare[:3] + 1
        try:
            step()
        except torch_xla_donate.DonationError:
            return total.tolist() == [2.0] * 3 and not torch_xla_donate.is_donated(self.spare)
        return False


UPDATES: tuple[Callable[[Loop], bool], ...] = (
    *(Loop.marked, Loop.automatic, Loop.read_between),
    *(Loop.compiled, Loop.replayed),
)
KINDS = (*UPDATES, Loop.fails_on_the_device, Loop.is_refused)


class Soak:
    """The threads, and what was read of the process between their cycles."""

    def __init__(self, devices: int, cycles: int) -> None:
        self.devices, self.cycles = devices, cycles
        self.every = max(1, cycles // 100)
        # How often each kind of step did what it is for, on each device.
        self.done: list[collections.Counter[str]] = [collections.Counter() for _ in range(devices)]
        self.loops: list[Loop] = []
        self.errors: list[str] = []
        self.memory: list[tuple[int, int]] = []
        self.sizes: list[dict[str, int]] = []
        self.compiles: list[int] = []
        self._barrier = threading.Barrier(devices, action=self._read)

    def run(self) -> None:
        threads = [threading.Thread(target=self._cycles, args=(device,)) for device in range(self.devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _cycles(self, device: int) -> None:
        try:
            loop = Loop(device)
            self.loops.append(loop)
            for cycle in range(1, self.cycles + 1):
                for kind in KINDS:
                    self.done[device][kind.__name__] += kind(loop)
                if cycle % self.every == 0:
                    self._barrier.wait()
        except threading.BrokenBarrierError:
            pass  # another thread has failed
        except BaseException as error:
            self.errors.append(f"device {device}: {type(error).__name__}: {error}")
            self._barrier.abort()

    def _read(self) -> None:
        """Runs on one thread while the others wait, so nothing of a step is left."""
        steps = (len(self.memory) + 1) * self.every * len(KINDS) * self.devices
        self.memory.append((steps, _common.resident()))
        self.sizes.append(_C.sizes())
        self.compiles.append(_common.compiles())

    def wrong(self) -> Iterator[str]:
        """What the steps did not do, and values that are wrong."""
        yield from self.errors
        if self.errors:
            return  # the threads ended early
        for device, done in enumerate(self.done):
            for kind in KINDS:
                name = kind.__name__
                if done[name] != self.cycles:
                    yield f"device {device}: {done[name]} of {self.cycles} steps of kind {name} did what they are for"
        used = {str(loop.device) for loop in self.loops}
        if len(used) != self.devices:
            yield f"the steps ran on {sorted(used)}, expected {self.devices} devices"
        updates = self.cycles * len(UPDATES)
        for loop in self.loops:
            if Loop.fails_on_the_device in KINDS and loop.raised < self.cycles / 2:
                yield f"{loop.device}: {loop.raised} of {self.cycles} failures were raised"
            counter, weights, momentum = (tensor.cpu() for tensor in loop.state)
            if not torch.equal(counter, torch.full_like(counter, updates)):
                yield f"{loop.device}: the counter is {counter.tolist()}, expected {updates} everywhere"
            for name, tensor, value in zip(("weights", "momentum"), (weights, momentum), expected(updates)):
                if not torch.allclose(tensor, torch.full(SHAPE, value), rtol=1e-5, atol=0):
                    yield f"{loop.device}: the {name} are {tensor.flatten()[:3].tolist()}, expected {value}"


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    options = result["options"]
    return {
        "all": _common.Table(
            f"soak: {options['steps']:,} steps of {len(result['kinds'])} kinds on {options['devices']} devices",
            (f"{options['steps']:,} steps on {options['devices']} devices, a thread for each", "found", "at most"),
            [
                (
                    "growth of resident memory, bytes a step",
                    f"{result['bytes_per_step']:.1f}",
                    f"{result['bytes_per_step_allowed']:.1f}",
                ),
                (
                    "records in the registry",
                    *(str(sum(result[key].values())) for key in ("registry_after_warm_up", "registry_allowed")),
                ),
                ("compilations after the warm-up", str(result["compiles_after_warm_up"]), "0"),
                (
                    f"steps of {len(result['kinds'])} kinds that did not donate, read or fail as they should",
                    str(sum(result["kinds"].values())),
                    "0",
                ),
            ],
        )
    }


@click.command()
@click.option("--steps", default=50_000, show_default=True, type=click.IntRange(min=100), help="At least so many.")
@click.option("--devices", default=8, show_default=True, type=click.IntRange(min=1), help="A thread for each.")
@_common.results_option
def main(steps: int, devices: int, results: Path) -> None:
    """Runs mixed steps on several devices at once, and checks that nothing grows."""
    os.environ["CPU_NUM_DEVICES"] = str(devices)  # read when the runtime starts
    a_cycle = len(KINDS) * devices
    soak = Soak(devices, cycles=-(-steps // a_cycle))
    before = _common.compiles()
    soak.run()
    failures = list(soak.wrong())

    warm = int(len(soak.memory) * WARM_UP)
    memory, sizes, compiles = (found[warm:] for found in (soak.memory, soak.sizes, soak.compiles))
    if len(memory) < 2 or compiles[0] == before:
        failures.append(f"{len(memory)} readings after the warm-up and {compiles[:1]} compilations: nothing to compare")
        memory, sizes, compiles = memory or [(0, 0)], sizes or [{}], compiles or [0]
    slope = growth(memory)
    limit = BYTES_PER_STEP + SLACK / max(memory[-1][0] - memory[0][0], 1)
    if slope > limit:
        failures.append(f"resident memory grows by {slope:.1f} bytes a step; at most {limit:.1f} expected")
    most = {key: max(found[key] for found in sizes) for key in sizes[0]}
    # A step of each device may have an outcome that nobody has read yet.
    allowed = {key: max(found[key] for found in soak.sizes[: warm + 1]) + devices for key in sizes[0]}
    if any(most[key] > allowed[key] for key in most):
        failures.append(f"the registry grows: {allowed} allowed, {most} found after the warm-up")
    if compiles[-1] != compiles[0]:
        failures.append(f"{compiles[-1] - compiles[0]} compilations after the warm-up, expected 0")

    command = f"python benchmarks/soak.py --steps {steps}"
    if devices != 8:
        command += f" --devices {devices}"
    result = _common.describe("soak", {"steps": soak.cycles * a_cycle, "devices": devices}, command=command)
    result |= {
        "kinds": {kind.__name__: sum(soak.cycles - done[kind.__name__] for done in soak.done) for kind in KINDS},
        "bytes_per_step": slope,
        "bytes_per_step_allowed": limit,
        "resident_change_bytes": memory[-1][1] - memory[0][1],
        "registry_allowed": allowed,
        "registry_after_warm_up": most,
        "compiles": compiles[-1] - before,
        "compiles_after_warm_up": compiles[-1] - compiles[0],
        "failures": failures,
    }
    _common.finish(results, result, tables(result))
    for failure in failures:
        click.echo(f"FAILED: {failure}", err=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
