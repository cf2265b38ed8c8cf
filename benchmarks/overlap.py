"""Whether the host prepares a step while the one before it runs, from XLA's profiler. Draws docs/overlap.svg."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import jax_side_by_side
import torch_xla
import torch_xla.debug.profiler

PLAIN, PURE, MARKS, BASE = "not donated", "pure=True", "marks", jax_side_by_side.BASE
VARIANTS = (PLAIN, MARKS, PURE, BASE)
# XLA runs small graphs in another way, without the events that are read here.
COUNT, FLOATS, TINY_FLOATS = 64, 1 << 20, 1 << 18
STEPS, SHOWN = 12, 6
CALL, RUN, HELPERS = "call of a step", "ThunkExecutor::Execute", "XLAEigen"

Span = tuple[float, float]


def worker(variant: str, floats: int) -> None:
    """Prints when each call and each run began and ended, in ns."""
    in_torch = variant != BASE
    make_step = jax_side_by_side.in_torch if in_torch else jax_side_by_side.in_jax
    step, make, wait = make_step(jax_side_by_side.sgd, variant if in_torch else True)  # type: ignore[arg-type]
    state: Any = [[make(floats, 1.0) for _ in range(COUNT)]]
    gradients = [make(floats, 0.5) for _ in range(COUNT)]
    if in_torch:
        _common.step()
    for _ in range(4):
        state = step(state, gradients)
    wait(state)
    import jax.profiler

    profiler = torch_xla.debug.profiler if in_torch else jax.profiler
    # torch_xla's Trace would also open a scope of graphs, in which no step may end.
    note = torch_xla._XLAC.profiler.TraceMe if in_torch else jax.profiler.TraceAnnotation
    with tempfile.TemporaryDirectory() as folder:
        profiler.start_trace(folder)
        for _ in range(STEPS):
            with note(CALL):
                state = step(state, gradients)
        wait(state)
        profiler.stop_trace()
        [path] = Path(folder).rglob("*.xplane.pb")
        calls, runs = read(jax.profiler.ProfileData.from_file(str(path)))
    print(json.dumps({"calls": calls, "runs": runs}))


def read(profile: Any) -> tuple[list[Span], list[Span]]:
    """The calls of the program, and the runs of the device.

    A run begins on a thread of the client, and ends with the last of its parts, some of which helpers run.
    """
    calls, begins, parts = [], [], []
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                span = (event.start_ns, event.start_ns + event.duration_ns)
                if event.name == CALL:
                    calls.append(span)
                elif event.name == RUN:
                    parts.append(span)
                    begins += [] if HELPERS in line.name else [span[0]]
    calls.sort()
    begins.sort()
    if len(calls) != STEPS or len(begins) != STEPS:
        raise RuntimeError(f"the profile has {len(calls)} calls and {len(begins)} runs, not {STEPS} of each")
    runs = []
    for begin, following in zip(begins, [*begins[1:], float("inf")]):
        runs.append((begin, max(end for start, end in parts if begin <= start < following)))
    return calls, runs


def measure(variant: str, floats: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", variant, "--floats", str(floats)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    calls, runs = found["calls"], found["runs"]
    idle = [max(0.0, later[0] - earlier[1]) for earlier, later in itertools.pairwise(runs)]
    return {
        "variant": variant,
        "step_ms": (runs[-1][1] - runs[0][0]) / STEPS / 1e6,
        "idle": sum(idle) / (runs[-1][1] - runs[0][0]),
        "longest_idle_us": max(idle) / 1e3,
        "prepared": sum(call[1] <= run[1] for call, run in zip(calls[1:], runs)),
        **{part: [[(at - calls[0][0]) / 1e6 for at in span] for span in found[part]] for part in ("calls", "runs")},
    }


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    rows = [
        [
            row["variant"],
            f"{row['step_ms']:.1f}",
            f"{row['idle']:.2%}",
            f"{row['longest_idle_us']:,.0f}",
            f"{row['prepared']} of {STEPS - 1}",
        ]
        for row in result["rows"]
    ]
    columns = ("step", "ms", "device idle", "longest pause, us", "calls that return during the run before")
    return {"idle": _common.Table("overlap: SGD, 64 x 4 MiB, in a loop", columns, rows, _common.aim(result))}


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(_common.FOLDER / "figures.mplstyle"):
        figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
        labels = []
        for index, row in enumerate(rows):
            for offset, (part, colour) in enumerate((("calls", "#d29922"), ("runs", "#2f81f7"))):
                spans = [(begin, end - begin) for begin, end in row[part][:SHOWN]]
                level = -(2.6 * index + offset)
                axes.broken_barh(spans, (level - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.6)
                labels.append((level, f"{row['variant']}: {'calls' if part == 'calls' else 'device'}"))
        axes.set_yticks([level for level, _ in labels], [label for _, label in labels])
        axes.set_xlabel(f"ms since the first call; the first {SHOWN} of {STEPS} steps")
        figure.savefig(folder / "overlap.svg", transparent=True, metadata={"Date": None, "Creator": None})


@click.command()
@_common.tiny_option
@_common.results_option
@click.option("--worker", "variant", type=click.Choice(VARIANTS), hidden=True)
@click.option("--floats", type=int, default=1, hidden=True)
def main(tiny: bool, results: Path, variant: str | None, floats: int) -> None:
    """Calls and runs of a training loop on one line of time."""
    if variant is not None:
        worker(variant, floats)
        return
    result = _common.describe("overlap", {"tiny": tiny}, "jax", "jaxlib")
    result["rows"] = [measure(variant, TINY_FLOATS if tiny else FLOATS) for variant in VARIANTS]
    donated = [row for row in result["rows"] if row["variant"] in (MARKS, PURE)]
    result["aim"] = {
        "text": "each donated call returns while the run before it computes",
        "met": all(row["prepared"] == STEPS - 1 for row in donated),
    }
    _common.finish(results, result, tables(result))
    draw(result["rows"], results if tiny else _common.FOLDER.parent / "docs")


if __name__ == "__main__":
    main()
