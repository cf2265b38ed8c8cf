"""Nanoseconds per tensor that donate_buffer() takes, beside torch_xla's private _set_buffer_donation()."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch_xla

import torch_xla_donate

# Nanoseconds for each tensor.
AIMS = {(1, "warm"): 1_000, (10_000, "warm"): 100, (10_000, "after a step"): 400}
# Enough calls a sample that the clock's own cost (a system call) does not count.
CALLS = 200


def processor_time(run: Callable[[], Any]) -> float:
    """Seconds of this thread's processor time: being scheduled away by other work does not count."""
    start = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - start) / 1e9


class Tensors:
    """``calls`` lists of ``count`` tensors, each of which one call of donate_buffer() is given."""

    def __init__(self, count: int, calls: int) -> None:
        self.groups = [[torch.ones(2).to("xla") for _ in range(count)] for _ in range(calls)]
        _common.step()

    def step(self) -> None:
        """Replaces all tensors by the outputs of a step, as a training loop does: their memory is not in a cache."""
        # The old tensors must go before the step, as in such a loop: freed after it, they would leave the allocator in
        # another state for what is measured next.
        self.groups = [[tensor * 0.999 for tensor in group] for group in self.groups]
        _common.step()


def measure(count: int, rounds: int, after_step: bool) -> dict[str, Any]:
    """Both ways over the same tensors, alternating; what they set is taken back outside the clock."""
    tensors = Tensors(count, max(1, CALLS // count) if not after_step else 1)
    set_buffer_donation = torch_xla._XLAC._set_buffer_donation
    donate_buffer = torch_xla_donate.donate_buffer

    def prepare() -> None:
        if after_step:
            tensors.step()

    def donate() -> float:
        prepare()
        groups = tensors.groups

        def run() -> None:
            for group in groups:
                donate_buffer(group)

        taken = processor_time(run)
        for group in groups:
            torch_xla_donate.cancel_donation(group)
        return taken

    def private() -> float:
        prepare()
        groups = tensors.groups

        def run() -> None:
            for group in groups:
                for tensor in group:
                    set_buffer_donation(tensor, True)

        taken = processor_time(run)
        for group in groups:
            for tensor in group:
                set_buffer_donation(tensor, False)
        return taken

    for warm in (donate, private):
        warm()
    samples = _common.side_by_side({"donate_buffer": donate, "private": private}, rounds)
    number = count * len(tensors.groups)
    return {
        "tensors": count,
        "state": "after a step" if after_step else "warm",
        "donate_buffer_ns": statistics.median(samples["donate_buffer"]) / number * 1e9,
        "set_buffer_donation_ns": statistics.median(samples["private"]) / number * 1e9,
        "ratio": _common.ratio(samples["donate_buffer"], samples["private"]),
    }


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    return {
        "all": _common.Table(
            "mark_cost: processor time per tensor",
            ("memory", "tensors", "`donate_buffer`, ns", "`_set_buffer_donation`, ns", "ratio (95%)"),
            [
                (
                    row["state"],
                    f"{row['tensors']:,}",
                    f"{row['donate_buffer_ns']:,.0f}",
                    f"{row['set_buffer_donation_ns']:,.0f}",
                    _common.shown(row["ratio"], 2),
                )
                for row in result["rows"]
            ],
            _common.aim(result),
        )
    }


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Cost of marking tensors."""
    counts = (1, 3) if tiny else (1, 100, 10_000)
    rounds = {1: 41, 100: 101, 10_000: 15}
    rows = [
        measure(count, 2 if tiny else rounds[count], after_step)
        for count in counts
        for after_step in (False, True)
        if not (after_step and count == 1)
    ]
    result = _common.describe("mark_cost", {"tiny": tiny})
    result["clock"] = "processor time of the calling thread"
    result["rows"] = rows
    found = {(row["tensors"], row["state"]): row["donate_buffer_ns"] for row in rows}
    result["aim"] = {
        "text": "; ".join(f"{count:,} {state}: at most {limit:,} ns" for (count, state), limit in AIMS.items()),
        "met": all(found.get(key, 0) <= limit for key, limit in AIMS.items()),
    }
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
