"""What the hooks cost a step: with nothing marked, hooked against unhooked; with all donated, against in-place."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch_xla.debug.metrics as metrics

import torch_xla_donate
from torch_xla_donate import _host

AIM = 0.01
SCALE = 0.999
MEASURES = ("wall", "processor", "instructions")
Step = Callable[[], None]


def parameters(count: int) -> list[torch.Tensor]:
    made = [torch.ones(2).to("xla") for _ in range(count)]
    _common.step()
    return made


def compiles() -> int:
    return int(metrics.counter_value("UncachedCompile") or 0)


def compare(
    variants: Mapping[str, tuple[Step, Step]], rounds: int, repeat: int, counter: _common.Instructions
) -> dict[str, dict[str, list[float]]]:
    """Runs ``repeat`` steps of each variant a round, after its untimed preparation.

    Returns, for each measure and variant, what a step took: seconds of wall time, seconds of processor time of all
    threads, and instructions where the machine counts them.
    """
    found: dict[str, dict[str, list[float]]] = {measure: {name: [] for name in variants} for measure in MEASURES}

    def sampled(name: str, prepare: Step, step: Step) -> Callable[[], float]:
        def sample() -> float:
            prepare()
            gc.collect()
            gc.disable()
            instructions = counter.read() if counter.available else 0
            processor = time.process_time()
            start = time.perf_counter()
            for _ in range(repeat):
                step()
            taken = (time.perf_counter() - start) / repeat
            found["processor"][name].append((time.process_time() - processor) / repeat)
            if counter.available:
                found["instructions"][name].append((counter.read() - instructions) / repeat)
            gc.enable()
            return taken

        return sample

    warm = compiles()
    found["wall"] = _common.side_by_side(
        {name: sampled(name, prepare, step) for name, (prepare, step) in variants.items()}, rounds
    )
    if compiles() != warm:
        raise RuntimeError(f"{compiles() - warm} compilations while measuring; expected none, all graphs are warm")
    return found


def ratios(found: Mapping[str, Mapping[str, list[float]]], one: str, base: str) -> dict[str, Any]:
    """The ratio of two variants for each measure; None where the machine does not count."""
    return {
        measure: _common.ratio(samples[one], samples[base]) if samples[one] else None
        for measure, samples in found.items()
    }


def unmarked(count: int, rounds: int, repeat: int, counter: _common.Instructions) -> dict[str, Any]:
    """p * c for every parameter: one graph, one executable, with the hooks and without."""
    held = parameters(count)

    def step() -> None:
        outputs = [tensor * SCALE for tensor in held]
        _common.step()
        del outputs

    for _ in range(3):
        step()
    try:
        found = compare(
            {"hooked": (_host.install_hooks, step), "unhooked": (_host.uninstall_hooks, step)}, rounds, repeat, counter
        )
    finally:
        _host.install_hooks()
    return {"parameters": count, **ratios(found, "hooked", "unhooked")}


def donated(count: int, rounds: int, repeat: int, counter: _common.Instructions) -> dict[str, Any]:
    """Every parameter replaced by p * c: not donated, donated, and in place."""
    kept, given, changed = parameters(count), parameters(count), parameters(count)

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
    for step in variants.values():
        for _ in range(3):
            step()
    found = compare({name: (lambda: None, step) for name, step in variants.items()}, rounds, repeat, counter)
    return {
        "parameters": count,
        "donated_over_in_place": ratios(found, "donated", "in_place"),
        "donated_over_not_donated": ratios(found, "donated", "plain"),
        # Nanoseconds of this machine on this day; kept for the growth below alone.
        "donated_ns_per_parameter": statistics.median(found["processor"]["donated"]) / count * 1e9,
        "not_donated_ns_per_parameter": statistics.median(found["processor"]["plain"]) / count * 1e9,
    }


def verdict(found: Sequence[Mapping[str, float]]) -> str:
    """Whether all ratios are under the aim; undecided where an interval reaches to both sides of it."""
    if all(ratio["high"] < 1 + AIM for ratio in found):
        return "met"
    return "not met" if any(ratio["low"] > 1 + AIM for ratio in found) else "undecided"


def text(found: Mapping[str, float] | None) -> str:
    return "not available" if found is None else _common.shown(found)


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Cost of the hooks for a step."""
    counter = _common.Instructions()
    # Rounds and steps a sample: some tenths of a second for each sample, but for the largest graph.
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
        (f"nothing marked, hooked / unhooked, {row['parameters']:,}", *(text(row[measure]) for measure in MEASURES))
        for row in idle
    ]
    for row in active:
        for label, key in (("in place", "donated_over_in_place"), ("not donated", "donated_over_not_donated")):
            rows.append(
                (f"donated / {label}, {row['parameters']:,}", *(text(row[key][measure]) for measure in MEASURES))
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
