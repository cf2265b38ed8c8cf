"""Processor time of a call of compile(f, donate_argnums=0), beside torch_xla.compile(f) without donation."""

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


def update(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    return {layer: {name: value * 0.999 for name, value in parts.items()} for layer, parts in state.items()}


def make_state(leaves: int) -> dict[str, dict[str, torch.Tensor]]:
    """Small dictionaries in a large one, as a model's state."""
    state = {f"layer{i}": {name: torch.ones(2).to("xla") for name in "wb"} for i in range(leaves // 2)}
    _common.step()
    return state


def call(function: Callable[[Any], Any], leaves: int) -> _common.Timed:
    """A loop of one call a sample, each with the result of the one before, as a training loop does."""
    state = make_state(leaves)
    for _ in range(3):
        state = function(state)

    def run() -> float:
        nonlocal state
        start = time.thread_time_ns()
        state = function(state)
        taken = time.thread_time_ns() - start
        _common.step()
        return taken / 1e9

    return run


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    labels = {
        "torch_xla.compile": "`torch_xla.compile(f)`",
        "lazy": "`compile(f, donate_argnums=0)`",
        "pure": "`compile(f, donate_argnums=0, pure=True)`",
    }
    leaves = result["rows"][0]["leaves"]
    return {
        "all": _common.Table(
            f"call_cost: processor time of a call with {leaves:,} donated leaves",
            (f"a call with {leaves:,} tensors", "ms", "ratio (95%)"),
            [(labels[row["call"]], f"{row['ms']:.2f}", _common.shown(row["ratio"], 2)) for row in result["rows"]],
        )
    }


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Cost of a call."""
    leaves, rounds = (4, 2) if tiny else (1_000, 31)
    variants = {
        "torch_xla.compile": call(torch_xla.compile(update), leaves),
        "lazy": call(torch_xla_donate.compile(update, donate_argnums=0), leaves),
        "pure": call(torch_xla_donate.compile(update, donate_argnums=0, pure=True), leaves),
    }
    samples = _common.side_by_side(variants, rounds)
    rows = [
        {
            "call": name,
            "leaves": leaves,
            "ms": statistics.median(seconds) * 1e3,
            "ratio": _common.ratio(seconds, samples["torch_xla.compile"]),
        }
        for name, seconds in samples.items()
    ]
    result = _common.describe("call_cost", {"tiny": tiny})
    result["clock"] = "processor time of the calling thread"
    result["rows"] = rows
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
