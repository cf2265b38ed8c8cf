"""Whether the host prepares a step while the one before it runs, from XLA's profiler. Draws docs/overlap.svg."""

from __future__ import annotations

import functools
import itertools
import json
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
        calls, begins, busy = read(jax.profiler.ProfileData.from_file(str(path)))
    print(json.dumps({"calls": calls, "begins": begins, "busy": busy}))


def read(profile: Any) -> tuple[list[Span], list[float], list[Span]]:
    """The calls of the program, where each run of the device begins, and when the device works on any of them."""
    calls, begins, parts = [], [], []
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                span = (event.start_ns, event.start_ns + event.duration_ns)
                if event.name == CALL:
                    calls.append(span)
                elif event.name == RUN:  # of a whole run, or of the part of it that a helper takes
                    parts.append(span)
                    begins += [] if HELPERS in line.name else [span[0]]
    if len(calls) != STEPS or len(begins) != STEPS:
        raise RuntimeError(f"the profile has {len(calls)} calls and {len(begins)} runs, not {STEPS} of each")
    busy: list[Span] = []
    for start, end in sorted(parts):
        if busy and start <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(end, busy[-1][1])
        else:
            busy.append((start, end))
    return sorted(calls), sorted(begins), busy


def measure(variant: str, floats: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", variant, "--floats", str(floats)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    calls, begins, busy = found["calls"], found["begins"], found["busy"]
    pauses = [later[0] - earlier[1] for earlier, later in itertools.pairwise(busy)] or [0.0]
    first = calls[0][0]
    return {
        "step_ms": (busy[-1][1] - busy[0][0]) / STEPS / 1e6,
        "idle": sum(pauses) / (busy[-1][1] - busy[0][0]),
        "longest_pause_us": max(pauses) / 1e3,
        "ahead": sum(call[1] <= begin for call, begin in zip(calls[1:], begins[1:])),
        "calls": [[(at - first) / 1e6 for at in span] for span in calls],
        "begins": [(at - first) / 1e6 for at in begins],
        "busy": [[(at - first) / 1e6 for at in span] for span in busy],
    }


def summary(variant: str, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all rounds, with the times of the last one for the picture."""
    return {
        "variant": variant,
        **{part: _common.spread([one[part] for one in rounds]) for part in ("step_ms", "idle", "longest_pause_us")},
        "ahead": min(one["ahead"] for one in rounds),
        **{part: rounds[-1][part] for part in ("calls", "begins", "busy")},
    }


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    rows = [
        [
            row["variant"],
            _common.shown(row["step_ms"], 1),
            f"{row['idle']['median']:.2%}",
            f"{row['longest_pause_us']['median']:,.0f}",
            f"{row['ahead']} of {STEPS - 1}",
        ]
        for row in result["rows"]
    ]
    columns = ("step", "ms (95%)", "device idle", "longest pause, us", "calls that return before their run begins")
    caption = f"{result['options']['rounds']} rounds; of the calls the fewest. {_common.aim(result)}"
    return {"idle": _common.Table("overlap: SGD, 64 x 4 MiB, in a loop", columns, rows, caption)}


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(_common.FOLDER / "figures.mplstyle"):
        figure, axes = pyplot.subplots(figsize=(7, 2.8), layout="constrained")
        labels = []
        for index, row in enumerate(rows):
            last = row["begins"][SHOWN] if len(row["begins"]) > SHOWN else float("inf")
            shown = {"calls": row["calls"][:SHOWN], "busy": [span for span in row["busy"] if span[0] < last]}
            for offset, (part, colour) in enumerate((("calls", "#d29922"), ("busy", "#2f81f7"))):
                level = -(2.6 * index + offset)
                spans = [(begin, min(end, last) - begin) for begin, end in shown[part]]
                axes.broken_barh(spans, (level - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.6)
                labels.append((level, f"{row['variant']}: {'calls' if part == 'calls' else 'device'}"))
            axes.vlines(row["begins"][:SHOWN], -2.6 * index - 1.4, -2.6 * index - 0.6, color="white", linewidth=1)
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
    rounds = 1 if tiny else 5
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}

    def once(variant: str) -> float:
        found[variant].append(measure(variant, TINY_FLOATS if tiny else FLOATS))
        return 0.0

    _common.side_by_side({variant: functools.partial(once, variant) for variant in VARIANTS}, rounds)
    result = _common.describe("overlap", {"tiny": tiny, "rounds": rounds}, "jax", "jaxlib")
    result["rows"] = [summary(variant, runs) for variant, runs in found.items()]
    donated = [row for row in result["rows"] if row["variant"] in (MARKS, PURE)]
    result["aim"] = {
        "text": "each donated call returns before its run begins, as the one before still computes",
        "met": all(row["ahead"] == STEPS - 1 for row in donated),
    }
    _common.finish(results, result, tables(result))
    draw(result["rows"], results if tiny else _common.FOLDER.parent / "docs")


if __name__ == "__main__":
    main()
