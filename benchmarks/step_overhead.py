"""Measures the cost of the hooks for a step: nothing marked against unhooked, all donated against in-place."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click

import torch_xla_donate
from torch_xla_donate import _host

AIM = 0.01
SCALE = 0.999


def unmarked(count: int, rounds: int, repeat: int, counter: _common.Instructions) -> dict[str, Any]:
    """p * c for every parameter, with the hooks and without. The hooks add edges to the graph's hash."""
    held = _common.small_tensors(count)

    def step() -> None:
        outputs = [tensor * SCALE for tensor in held]
        _common.step()
        del outputs

    try:
        found = _common.compare(
            {"hooked": (_host.install_hooks, step), "unhooked": (_host.uninstall_hooks, step)}, rounds, repeat, counter
        )
    finally:
        _host.install_hooks()
    return {"parameters": count, **_common.ratios(found, "hooked", "unhooked")}


def donated(count: int, rounds: int, repeat: int, counter: _common.Instructions) -> dict[str, Any]:
    """Every parameter replaced by p * c: not donated, donated, and in place."""
    kept, given, changed = _common.small_tensors(count), _common.small_tensors(count), _common.small_tensors(count)

    def plain() -> None:
        kept[:] = [tensor * SCALE for tensor in kept]
        _common.step()

    def donate() -> None:
        torch_xla_donate.donate_buffer(given)
        given[:] = [tensor * SCALE for tensor in given]
        _common.step()

    def in_place() -> None:
        for tensor in changed:
            tensor.mul_(SCALE)
        _common.step()

    variants = {"plain": plain, "donated": donate, "in_place": in_place}
    found = _common.compare({name: (lambda: None, step) for name, step in variants.items()}, rounds, repeat, counter)
    return {
        "parameters": count,
        "donated_over_in_place": _common.ratios(found, "donated", "in_place"),
        "donated_over_not_donated": _common.ratios(found, "donated", "plain"),
        # Nanoseconds of this machine on this day, kept only for the growth below.
        "donated_ns_per_parameter": statistics.median(found["processor"]["donated"]) / count * 1e9,
        "not_donated_ns_per_parameter": statistics.median(found["processor"]["plain"]) / count * 1e9,
    }


def verdict(found: Sequence[Mapping[str, float]]) -> str:
    """Whether all ratios are under the aim; undecided where an interval reaches to both sides of it."""
    if all(ratio["high"] < 1 + AIM for ratio in found):
        return "met"
    return "not met" if any(ratio["low"] > 1 + AIM for ratio in found) else "undecided"


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Cost of the hooks for a step."""
    counter = _common.Instructions()
    # Rounds and steps a sample: some tenths of a second for each sample, except for the largest graph.
    idle_sizes = {1: (2, 3), 3: (2, 2)} if tiny else {1: (120, 100), 1_000: (80, 10), 10_000: (40, 1)}
    donated_sizes = {3: (2, 2), 5: (2, 2)} if tiny else {1_000: (30, 5), 10_000: (15, 1)}
    idle = [unmarked(count, rounds, repeat, counter) for count, (rounds, repeat) in idle_sizes.items()]
    active = [donated(count, rounds, repeat, counter) for count, (rounds, repeat) in donated_sizes.items()]
    small, large = active

    result = _common.describe("step_overhead", "python benchmarks/step_overhead.py", {"tiny": tiny})
    result["instructions"] = "available" if counter.available else "not available"
    result["nothing_marked"] = idle
    result["all_donated"] = active
    result["growth_per_parameter"] = {
        "from": small["parameters"],
        "to": large["parameters"],
        "donated": large["donated_ns_per_parameter"] / small["donated_ns_per_parameter"],
        "not_donated": large["not_donated_ns_per_parameter"] / small["not_donated_ns_per_parameter"],
    }
    result["aim"] = {
        "text": "nothing marked: less than 1% of a step",
        "limit": AIM,
        "verdict": verdict([row["instructions"] or row["wall"] for row in idle]),
    }
    rows = [
        (
            f"nothing marked, hooked / unhooked, {row['parameters']:,}",
            *(_common.shown(row[measure]) for measure in _common.MEASURES),
        )
        for row in idle
    ]
    for row in active:
        for label, key in (("in place", "donated_over_in_place"), ("not donated", "donated_over_not_donated")):
            rows.append(
                (
                    f"donated / {label}, {row['parameters']:,}",
                    *(_common.shown(row[key][measure]) for measure in _common.MEASURES),
                )
            )
    growth = result["growth_per_parameter"]
    _common.finish(
        results,
        result,
        _common.table_of(
            "step_overhead: time of a step, medians of the ratios of each round (95%)",
            ("step, parameters", "wall time", "processor time", "instructions"),
            rows,
            f"Cost per parameter, {growth['to']:,} over {growth['from']:,} parameters: donated "
            f"{growth['donated']:.2f}, not donated {growth['not_donated']:.2f}. "
            f"Aim: nothing marked under {1 + AIM:.2f}: {result['aim']['verdict']}.",
        ),
    )


if __name__ == "__main__":
    main()
