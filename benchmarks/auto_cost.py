"""Measures the cost of auto_donate for a step: for each live tensor, for each donor, and while it is off."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import torch

import torch_xla_donate
from torch_xla_donate import _host, set_auto_donate

SCALE = 0.999
# "A small constant": what one look at a tensor may cost, with the memory it lies in cold.
AIM_NS = 100
OFF_AIM = 0.01


def on() -> None:
    set_auto_donate(True)


def off() -> None:
    set_auto_donate(False)


def multiply(held: list[torch.Tensor], before: Callable[[list[torch.Tensor]], Any] | None = None) -> Callable[[], None]:
    """A step that replaces every tensor of the list."""

    def step() -> None:
        if before is not None:
            before(held)
        held[:] = [tensor * SCALE for tensor in held]
        _common.step()

    return step


def live(count: int, read: bool) -> list[torch.Tensor]:
    """Tensors that a step may be beside.

    Args:
        read: whether an earlier step has read them, as it has frozen weights: a tensor keeps its graph node then.
    """
    others = _common.small_tensors(count)
    if read:
        results = [tensor * SCALE for tensor in others]
        _common.step()
        del results
    return others


def bystanders(
    count: int, read: bool, rounds: int, repeat: int, counter: _common.Instructions
) -> dict[str, dict[str, list[float]]]:
    """A tiny step beside ``count`` live tensors that it does not read, with auto_donate() on and off.

    Args:
        read: as for `live`.
    """
    others = live(count, read)
    variants = {"on": (on, multiply(_common.small_tensors(1))), "off": (off, multiply(_common.small_tensors(1)))}
    found = _common.compare(variants, rounds, repeat, counter)
    del others
    return found


def more(found: Mapping[str, Sequence[float]]) -> list[float]:
    """On less off, round by round: what else the machine does drifts, and cancels out."""
    return [one - other for one, other in zip(found["on"], found["off"])]


def live_tensors(
    plan: Mapping[int, tuple[int, int]], read: bool, counter: _common.Instructions
) -> list[dict[str, Any]]:
    """The cost of each live tensor, in addition to a step without any. ``plan``: number -> rounds, steps a sample."""
    alone = bystanders(0, read, *plan[0], counter)
    rows = []
    for count, sizes in plan.items():
        found = bystanders(count, read, *sizes, counter) if count else alone
        thread = found["thread"]

        def each(measure: str, scale: float, found: Any = found, count: int = count) -> dict[str, float] | None:
            if not found[measure]["on"]:
                return None
            fixed = statistics.median(more(alone[measure]))
            return _common.spread([(value - fixed) / count * scale for value in more(found[measure])])

        row: dict[str, Any] = {
            "live": count,
            "read_before": read,
            "step_us": _common.spread([seconds * 1e6 for seconds in more(thread)]),
            "on_over_off": _common.ratio(thread["on"], thread["off"]),
        }
        if count:
            row["ns_per_tensor"] = each("thread", 1e9)
            row["instructions_per_tensor"] = each("instructions", 1)
        rows.append(row)
    return rows


def all_replaced(count: int, rounds: int, repeat: int, counter: _common.Instructions) -> dict[str, Any]:
    """Every parameter replaced by p * c: not donated, marked by hand, and automatic."""
    variants = {
        "not donated": (off, multiply(_common.small_tensors(count))),
        "by hand": (off, multiply(_common.small_tensors(count), torch_xla_donate.donate_buffer)),
        "auto": (on, multiply(_common.small_tensors(count))),
    }
    found = _common.compare(variants, rounds, repeat, counter)
    off()
    return {
        "parameters": count,
        "auto_over_not_donated": _common.ratios(found, "auto", "not donated"),
        "by_hand_over_not_donated": _common.ratios(found, "by hand", "not donated"),
        "auto_over_by_hand": _common.ratios(found, "auto", "by hand"),
    }


def switched_off(count: int, rounds: int, repeat: int, counter: _common.Instructions) -> dict[str, Any]:
    """A tiny step beside ``count`` live tensors with auto_donate off, hooked against unhooked."""
    others = _common.small_tensors(count)
    off()
    step = multiply(_common.small_tensors(1))
    variants = {"hooked": (_host.install_hooks, step), "unhooked": (_host.uninstall_hooks, step)}
    try:
        found = _common.compare(variants, rounds, repeat, counter)
    finally:
        _host.install_hooks()
    del others
    return {"live": count, **_common.ratios(found, "hooked", "unhooked")}


def verdict(found: Sequence[Mapping[str, float]], limit: float) -> str:
    """Whether all are under the limit; undecided where an interval reaches to both sides of it."""
    if all(one["high"] < limit for one in found):
        return "met"
    return "not met" if any(one["low"] > limit for one in found) else "undecided"


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Cost of automatic donation."""
    counter = _common.Instructions()
    # Rounds, and steps a sample.
    live_sizes = {0: (2, 2), 2: (2, 2), 20: (2, 2)} if tiny else {
        0: (60, 50), 100: (60, 50), 1_000: (50, 20), 10_000: (40, 4)
    }  # fmt: skip
    replaced_sizes = {2: (2, 2), 3: (2, 2)} if tiny else {100: (40, 10), 1_000: (30, 2)}
    off_sizes = {0: (2, 2), 20: (2, 2)} if tiny else {0: (60, 50), 10_000: (40, 5)}

    # Each sample begins with a collection, which then need not go through all modules.
    gc.freeze()
    rows = [row for read in (False, True) for row in live_tensors(live_sizes, read, counter)]
    idle = [switched_off(count, *sizes, counter) for count, sizes in off_sizes.items()]
    replaced = [all_replaced(count, *sizes, counter) for count, sizes in replaced_sizes.items()]

    result = _common.describe("auto_cost", "python benchmarks/auto_cost.py", {"tiny": tiny})
    result["clock"] = "per live tensor: processor time of the thread that steps; ratios: as named"
    result["instructions"] = "available" if counter.available else "not available"
    result["live_tensors"] = rows
    result["growth_per_tensor"] = [
        {
            "read_before": read,
            "from": smallest["live"],
            "to": largest["live"],
            "ns": largest["ns_per_tensor"]["median"] / smallest["ns_per_tensor"]["median"],
        }
        for read in (False, True)
        for smallest, *_, largest in [[row for row in rows if row["live"] > 0 and row["read_before"] is read]]
    ]
    result["all_replaced"] = replaced
    result["off"] = idle
    largest = [row for row in rows if row["live"] == max(live_sizes)]
    result["aims"] = [
        {
            "text": f"under {AIM_NS} ns for each of {max(live_sizes):,} live tensors",
            "limit": AIM_NS,
            "verdict": verdict([row["ns_per_tensor"] for row in largest], AIM_NS),
        },
        {
            "text": "off: less than 1% of a step",
            "limit": OFF_AIM,
            "verdict": verdict([row["instructions"] or row["processor"] for row in idle], 1 + OFF_AIM),
        },
    ]
    ratios = [
        (f"{row['parameters']:,} replaced: {key.replace('_over_', ' / ').replace('_', ' ')}", row[key])
        for row in replaced
        for key in ("auto_over_not_donated", "by_hand_over_not_donated", "auto_over_by_hand")
    ] + [(f"off, beside {row['live']:,} live tensors: hooked / unhooked", row) for row in idle]
    growth = ", ".join(f"{row['ns']:.2f}" for row in result["growth_per_tensor"])
    _common.finish(
        results,
        result,
        _common.table_of(
            "auto_cost: processor time of a step beside live tensors that it does not read, with auto_donate (95%)",
            ("live tensors", "on / off", "on - off, µs", "for each tensor, ns", "instructions"),
            [
                (
                    f"{row['live']:,}, {'read before' if row['read_before'] else 'never read'}",
                    _common.shown(row["on_over_off"]),
                    _common.shown(row["step_us"], 1),
                    *(
                        (_common.shown(row["ns_per_tensor"], 0), _common.shown(row["instructions_per_tensor"], 0))
                        if row["live"]
                        else ("", "")
                    ),
                )
                for row in rows
            ],
            f"For each tensor: beyond what a step without any costs; growth from {sorted(live_sizes)[1]:,} to "
            f"{max(live_sizes):,}: {growth}. Aim: {result['aims'][0]['text']}: {result['aims'][0]['verdict']}.",
        ),
        _common.table_of(
            "auto_cost: time of a step, medians of the ratios of each round (95%)",
            ("step", "wall time", "processor time", "instructions"),
            [(name, *(_common.shown(row[measure]) for measure in _common.MEASURES)) for name, row in ratios],
            f"Aim: {result['aims'][1]['text']}: {result['aims'][1]['verdict']}.",
        ),
    )


if __name__ == "__main__":
    main()
