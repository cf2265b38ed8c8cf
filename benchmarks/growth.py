"""How the cost of each part for a tensor grows with the number of tensors: 10 to 1,000,000. Draws docs/growth.svg."""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import step_cost

import torch_xla_donate
from torch_xla_donate import _C
from torch_xla_donate._tools.record import _Record

SIZES = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
# XLA's compiler for CPU takes 1 s for a graph of 3,000 parameters and 24 s for 10,000. For 100,000 it would take about
# 40 minutes. The other parts need no graph of so many parameters.
MOST_IN_A_GRAPH = 10_000
# valgrind interprets each instruction, so it takes fifty times as long.
MOST_COUNTED, MOST_COUNTED_IN_A_GRAPH = 100_000, 1_000
CALLS = 20_000  # tensors in a sample, at least
MARK, IS_DONATED, AUTO = "donate_buffer of a list", "is_donated", "auto_donate, beside live tensors"
PLAIN, DONATED, SETTLE = "step, not donated", "step, donated", "outcomes, on other threads"
REPORT, VERIFY = "donation_report", "record of verify"
PARTS = (MARK, IS_DONATED, AUTO, PLAIN, DONATED, SETTLE, REPORT, VERIFY)
# A part bends where it costs this many times as much for a tensor as with 1,000 tensors.
BEND, BASE = 2.0, 1_000

Run = Callable[[], Any]


def nothing() -> None:
    """There is nothing to undo."""


@contextlib.contextmanager
def parts_of_marks(count: int) -> Iterator[dict[str, tuple[Run, Run]]]:
    """What is measured for live tensors, and what undoes it."""
    tensors = _common.small_tensors(count)

    def mark() -> None:
        torch_xla_donate.donate_buffer(tensors)

    def ask() -> None:
        for tensor in tensors:
            torch_xla_donate.is_donated(tensor)

    yield {MARK: (mark, lambda: torch_xla_donate.cancel_donation(tensors)), IS_DONATED: (ask, nothing)}


@contextlib.contextmanager
def parts_of_report(count: int) -> Iterator[dict[str, tuple[Run, Run]]]:
    """What is measured for the donors of a step. The record is that of a process under `verify`."""
    step = step_cost.multiply(_common.small_tensors(count), torch_xla_donate.donate_buffer)
    for _ in range(3):
        step()
    graph = _C.steps()[-1]["graph"]
    with tempfile.TemporaryDirectory() as folder:
        record = _Record(Path(folder))
        yield {
            REPORT: (lambda: torch_xla_donate.donation_report(steps=1), nothing),
            VERIFY: (lambda: record._describe_donors(1, graph), nothing),
        }


def sampled(run: Run, undo: Run, count: int, rounds: int) -> float:
    """Nanoseconds of this thread's processor time for a tensor, the median of the rounds."""
    repeat = max(1, CALLS // count)
    samples = []
    for _ in range(rounds):
        taken = 0
        gc.disable()
        for _ in range(repeat):
            start = time.thread_time_ns()
            run()
            taken += time.thread_time_ns() - start
            undo()
        gc.enable()
        samples.append(taken / repeat / count)
    return statistics.median(samples)


def time_parts(count: int, rounds: int) -> dict[str, float]:
    found: dict[str, float] = {}
    repeat = max(1, CALLS // 20 // count)
    with parts_of_marks(count) as parts:
        found |= {name: sampled(*part, count, rounds) for name, part in parts.items()}
        found[AUTO] = beside_live_tensors(count, rounds, repeat)
    if count <= MOST_IN_A_GRAPH:
        with parts_of_report(count) as parts:
            found |= {name: sampled(*part, count, rounds) for name, part in parts.items()}
        steps = step_cost.all_replaced(count)
        chosen = {name: steps[name] for name in ("not donated", "by hand")}
        clocks = step_cost.timed(chosen, rounds, repeat)
        for name, way in ((PLAIN, "not donated"), (DONATED, "by hand")):
            found[name] = statistics.median(clocks["thread"][way]) / count * 1e9
        others = {
            way: [all_ - own for all_, own in zip(clocks["processor"][way], clocks["thread"][way])] for way in chosen
        }
        more = [one - other for one, other in zip(others["by hand"], others["not donated"])]
        found[SETTLE] = max(0.0, statistics.median(more)) / count * 1e9
    return found


def beside_live_tensors(count: int, rounds: int, repeat: int) -> float:
    """What auto_donate() adds to a step of one tensor, for each of so many live tensors beside it."""
    ways = step_cost.beside(0, read=False)
    found = step_cost.timed({way: ways[way] for way in ("on", "off")}, rounds, repeat)["thread"]
    step_cost.off()
    return statistics.median(step_cost.more(found)) / count * 1e9


def bytes_of_a_mark(count: int) -> float:
    """Resident memory that a mark takes."""
    with parts_of_marks(count) as parts:
        mark, undo = parts[MARK]
        _common.trim()
        before = _common.resident()
        mark()
        found = (_common.resident() - before) / count
        undo()
    return found


# ---- Instructions ----


def child(sizes: Sequence[int]) -> None:
    """The process that is counted: a dump for each part and size, after calls that do not count."""
    step_cost.begin_counting()
    for parts_of, most in ((parts_of_marks, MOST_COUNTED), (parts_of_report, MOST_COUNTED_IN_A_GRAPH)):
        for count in (size for size in sizes if size <= most):
            with parts_of(count) as parts:
                for name, (run, undo) in parts.items():
                    run()
                    undo()
                    with step_cost.counted(f"{name},{count}"):
                        run()
                    undo()


def count_all(sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Instructions for a tensor, by part and size."""
    found: dict[str, dict[str, float]] = {}
    for name, total in step_cost.under_valgrind(__file__, list(sizes)).items():
        part, _, count = name.rpartition(",")
        found.setdefault(part, {})[count] = total / int(count)
    return found


# ---- The result ----


def bends(ns: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    """The parts that cost more for a tensor from some number of tensors on, and that number."""
    found = {}
    for part, by_size in ns.items():
        base = by_size.get(str(BASE))
        larger = [int(size) for size, cost in by_size.items() if base and int(size) > BASE and cost > BEND * base]
        if larger:
            found[part] = min(larger)
    return found


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    sizes = [str(size) for size in result["sizes"]]

    def row(part: str, found: Mapping[str, float]) -> list[str]:
        return [part, *(f"{found[size]:,.0f}" if size in found else "" for size in sizes)]

    heads = [f"{int(size):,}" for size in sizes]
    counted = result["instructions"]
    bent = "; ".join(f"{part} from {size:,}" for part, size in result["bends"].items()) or "none"
    return {
        "time": _common.Table(
            "growth: nanoseconds for a tensor, processor time",
            ("tensors", *heads),
            [row(part, result["ns"][part]) for part in PARTS if part in result["ns"]],
            f"Costs more than {BEND:.0f} times as much for a tensor as with {BASE:,} tensors: {bent}. "
            f"A mark takes {result['bytes_of_a_mark']:,.0f} bytes.",
        ),
        "instructions": _common.Table(
            "growth: instructions for a tensor",
            ("tensors", *heads),
            [row(part, found) for part, found in counted.items()] if isinstance(counted, Mapping) else [],
        ),
    }


def draw(result: Mapping[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(_common.FOLDER / "figures.mplstyle"):
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        for part in PARTS:
            found = sorted((int(size), cost) for size, cost in result["ns"].get(part, {}).items() if cost > 0)
            axes.plot(*zip(*found), marker="o", markersize=3, label=part, linestyle="--" if part == PLAIN else "-")
        axes.set(xscale="log", yscale="log", xlabel="tensors", ylabel="ns for a tensor")
        figure.legend(frameon=False, loc="outside right upper")
        figure.savefig(folder / "growth.svg", transparent=True, metadata={"Date": None, "Creator": None})


@click.command()
@click.option("--child", "as_child", hidden=True)
@click.option("--draw", "only_draw", is_flag=True, help="Draw the figure from the result file.")
@_common.tiny_option
@_common.results_option
def main(as_child: str | None, only_draw: bool, tiny: bool, results: Path) -> None:
    """Growth of each part's cost; about ten minutes."""
    docs = results if tiny or results != _common.RESULTS else _common.FOLDER.parent / "docs"
    if as_child is not None:
        child(json.loads(as_child))
        return
    if only_draw:
        draw(json.loads((results / "growth.json").read_text(encoding="utf-8")), docs)
        return
    sizes = (2, 20) if tiny else SIZES
    gc.freeze()
    ns: dict[str, dict[str, float]] = {}
    for count in sizes:
        for part, cost in time_parts(count, 2 if tiny else 9 if count <= BASE else 3).items():
            ns.setdefault(part, {})[str(count)] = cost
    result = _common.describe("growth", {"tiny": tiny})
    result["clock"] = "processor time of the calling thread, but for what runs on other threads"
    result["sizes"] = list(sizes)
    result["ns"] = ns
    result["bends"] = bends(ns)
    result["bytes_of_a_mark"] = bytes_of_a_mark(sizes[-2])
    result["instructions"] = count_all(sizes) if step_cost.can_count(tiny) else "not counted: needs valgrind"
    _common.finish(results, result, tables(result))
    draw(result, docs)


if __name__ == "__main__":
    main()
