"""The cost of the hooks, of donation and of auto_donate() for a step of small tensors: time, and instructions.

Two meters read the same steps. The clock alternates the variants of a case, because what else the machine does drifts.
valgrind counts instructions, the same in each run, where it is installed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import torch

import torch_xla_donate
from torch_xla_donate import _host, set_auto_donate

SCALE = 0.999
NOTHING_MARKED, ALL_REPLACED, BESIDE, BESIDE_READ = "nothing marked", "all replaced", "beside", "beside read"
# The ratios that answer the question of each case.
PAIRS = {
    NOTHING_MARKED: (("hooked", "unhooked"),),
    ALL_REPLACED: (("by hand", "not donated"), ("auto", "not donated"), ("by hand", "in place")),
    BESIDE: (("on", "off"), ("off", "unhooked")),
    BESIDE_READ: (("on", "off"), ("off", "unhooked")),
}
# Case, tensors, rounds, steps a sample: some tenths of a second for each sample, except for the largest graphs.
SIZES = [
    *((NOTHING_MARKED, *size) for size in ((1, 40, 1_000), (1_000, 80, 10), (10_000, 40, 1))),
    *((ALL_REPLACED, *size) for size in ((100, 40, 10), (1_000, 30, 3), (10_000, 15, 1))),
    *((BESIDE, *size) for size in ((0, 60, 50), (100, 60, 50), (1_000, 50, 20), (10_000, 40, 4))),
    *((BESIDE_READ, *size) for size in ((0, 60, 50), (100, 60, 50), (1_000, 50, 20), (10_000, 40, 4))),
]
TINY_SIZES = [(case, count, 2, 2) for case in PAIRS for count in ((2, 3) if "beside" not in case else (0, 2, 20))]
# valgrind interprets each instruction, and takes very long for the graphs of more parameters.
MOST_PARAMETERS_COUNTED = 1_000
# The aims: nothing marked, a step may take 1% longer; a look at one live tensor is "a small constant".
HOOKS_AIM, AUTO_AIM_NS = 0.01, 100
CONTROL, VALGRIND = "callgrind_control", "valgrind"
NOTHING = "nothing"  # the dump that tells what a dump takes

# What comes before the steps of a variant, and the step.
Variant = tuple[Callable[[], Any], Callable[[], Any]]


def prepare(hooks: bool = True, auto: bool = False) -> None:
    if hooks:
        _host.install_hooks()
        set_auto_donate(auto)
    else:
        set_auto_donate(False)
        _host.uninstall_hooks()


def off() -> None:
    prepare()


def on() -> None:
    prepare(auto=True)


def unhooked() -> None:
    prepare(hooks=False)


def multiply(held: list[torch.Tensor], before: Callable[[list[torch.Tensor]], Any] | None = None) -> Callable[[], None]:
    """A step that replaces each of these tensors by p * c."""

    def step() -> None:
        if before is not None:
            before(held)
        held[:] = [tensor * SCALE for tensor in held]
        _common.step()

    return step


def nothing_marked(count: int) -> dict[str, Variant]:
    """p * c for every parameter, which stays. The hooks add edges to the graph's hash, so both compile."""
    held = _common.small_tensors(count)

    def step() -> None:
        outputs = [tensor * SCALE for tensor in held]
        _common.step()
        del outputs

    return {"hooked": (off, step), "unhooked": (unhooked, step)}


def all_replaced(count: int) -> dict[str, Variant]:
    held = _common.small_tensors(count)  # the same for all, so that no step has others beside it

    def in_place() -> None:
        for tensor in held:
            tensor.mul_(SCALE)
        _common.step()

    return {
        "not donated": (off, multiply(held)),
        "by hand": (off, multiply(held, torch_xla_donate.donate_buffer)),
        "auto": (on, multiply(held)),
        "in place": (off, in_place),
    }


def beside(count: int, read: bool) -> dict[str, Variant]:
    """A step of one tensor beside live tensors that it does not read.

    Args:
        read: whether an earlier step has read them, as it has frozen weights: a tensor keeps its graph node then.
    """
    others = _common.small_tensors(count)
    if read:
        results = [tensor * SCALE for tensor in others]
        _common.step()
        del results
    replace = multiply(_common.small_tensors(1))

    def step(others: list[torch.Tensor] = others) -> None:
        replace()

    return {"on": (on, step), "off": (off, step), "unhooked": (unhooked, step)}


def variants_of(case: str, count: int) -> dict[str, Variant]:
    if case == NOTHING_MARKED:
        return nothing_marked(count)
    return all_replaced(count) if case == ALL_REPLACED else beside(count, case == BESIDE_READ)


# ---- The clock ----


def timed(variants: Mapping[str, Variant], rounds: int, repeat: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of a step of each variant, round by round.

    Three steps of each variant come before; they compile its graphs.

    Returns, for each variant, wall time, and processor time of all threads and of the one that steps.
    """
    found: dict[str, dict[str, list[float]]] = {
        clock: {name: [] for name in variants} for clock in ("wall", "processor", "thread")
    }
    clocks = {"wall": time.perf_counter, "processor": time.process_time, "thread": time.thread_time}

    def sampled(name: str) -> _common.Timed:
        before, step = variants[name]

        def sample() -> float:
            before()
            step()  # the first one after the hooks have come or gone takes several times as long
            gc.collect()
            gc.disable()
            start = {clock: read() for clock, read in clocks.items()}
            for _ in range(repeat):
                step()
            for clock, read in clocks.items():
                found[clock][name].append((read() - start[clock]) / repeat)
            gc.enable()
            return 0.0

        return sample

    for before, step in variants.values():
        before()
        for _ in range(3):
            step()
    warm = _common.compiles()
    _common.side_by_side({name: sampled(name) for name in variants}, rounds)
    if _common.compiles() != warm:
        raise RuntimeError(f"{_common.compiles() - warm} compilations while measuring; expected none, graphs are warm")
    return found


def more(found: Mapping[str, Sequence[float]]) -> list[float]:
    """On less off, round by round: what else the machine does drifts, and cancels out."""
    return [one - other for one, other in zip(found["on"], found["off"])]


def time_all(sizes: Sequence[tuple[str, int, int, int]]) -> list[dict[str, Any]]:
    rows = []
    alone = 0.0
    for case, count, rounds, repeat in sizes:
        try:
            found = timed(variants_of(case, count), rounds, repeat)
        finally:
            off()
        row: dict[str, Any] = {"case": case, "tensors": count, "ratios": {}}
        for one, base in PAIRS[case]:
            row["ratios"][f"{one} / {base}"] = {
                clock: _common.ratio(found[clock][one], found[clock][base]) for clock in ("wall", "processor", "thread")
            }
        if "beside" in case:
            row["auto_us"] = _common.spread([seconds * 1e6 for seconds in more(found["thread"])])
            if count == 0:
                alone = row["auto_us"]["median"]
            else:
                each = [(seconds * 1e6 - alone) / count * 1e3 for seconds in more(found["thread"])]
                row["auto_ns_for_each"] = _common.spread(each)
        rows.append(row)
    return rows


# ---- Instructions ----


def control(command: str) -> None:
    subprocess.run([CONTROL, command, str(os.getpid())], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@contextlib.contextmanager
def counted(name: str) -> Iterator[None]:
    """Counts what runs in the context, into a dump of this name. Nothing may be compiled in it."""
    gc.collect()
    gc.disable()
    warm = _common.compiles()
    control("--instr=on")
    control("--zero")
    yield
    control(f"--dump={name}")
    control("--instr=off")  # which forgets what has been counted
    gc.enable()
    if _common.compiles() != warm:
        raise RuntimeError(f"{name}: compiled while counting; expected a warm graph")


def begin_counting() -> None:
    """Each process that is counted calls it first. Counts what a dump itself takes."""
    gc.freeze()
    with counted(NOTHING):
        pass


def child(keys: Sequence[tuple[str, int]]) -> None:
    """The process that is counted: one dump for each variant, of some steps after three that do not count."""
    begin_counting()
    for case, count in keys:
        # The dump itself takes as long as some small steps, so there are many of them.
        repeat = 200 if count <= 1 and "beside" not in case else 5
        for name, (before, step) in variants_of(case, count).items():
            before()
            for _ in range(3):
                step()
            with counted(f"{case},{count},{name},{repeat}"):
                for _ in range(repeat):
                    step()
            off()


def totals(folder: Path) -> dict[str, int]:
    """Instructions of the thread that steps, by the name of the dump. Without those of the dump itself."""
    found = {}
    for path in folder.glob("counts.*-01"):
        lines = path.read_text(encoding="utf-8").splitlines()
        heads = dict(line.split(": ", 1) for line in lines[:40] if ": " in line)
        trigger = next((line for line in lines[:40] if line.startswith("desc: Trigger: dump ")), None)
        if trigger is not None:
            found[trigger.removeprefix("desc: Trigger: dump ")] = int(heads["summary"])
    of_dump = found.pop(NOTHING)
    return {name: total - of_dump for name, total in found.items()}


def per_step(found: Mapping[str, int]) -> dict[str, float]:
    """Instructions of a step, by case, number of tensors and variant."""
    steps = {dump: dump.rpartition(",") for dump in found}
    return {name: found[dump] / int(repeat) for dump, (name, _, repeat) in steps.items()}


def can_count(tiny: bool) -> bool:
    """Whether instructions are counted: not where valgrind is missing, and not for the smallest sizes."""
    return not tiny and all(shutil.which(program) is not None for program in (VALGRIND, CONTROL))


def under_valgrind(script: str, given: Any) -> dict[str, int]:
    """Runs ``script --child`` with what it is given; instructions by the name of the dump."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            VALGRIND, "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes", "-q",
            f"--callgrind-out-file={folder}/counts", sys.executable, script, "--child", json.dumps(given),
        ]  # fmt: skip
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise click.ClickException(f"the process under valgrind ended with {done.returncode}; see above")
        return totals(Path(folder))


def add_instructions(rows: Sequence[dict[str, Any]], found: Mapping[str, float]) -> None:
    for row in rows:
        case, tensors = row["case"], row["tensors"]
        names = dict.fromkeys(name for pair in PAIRS[case] for name in pair)
        if f"{case},{tensors},{next(iter(names))}" not in found:
            continue
        row["instructions"] = {name: found[f"{case},{tensors},{name}"] for name in names}
        if "beside" in case and tensors:
            alone = {name: found[f"{case},0,{name}"] for name in names}
            extra = {name: (row["instructions"][name] - alone[name]) / tensors for name in names}
            row["auto_instructions_for_each"] = extra["on"] - extra["off"]
            row["stock_instructions_for_each"] = extra["unhooked"]


# ---- The result ----


def verdict(found: Sequence[Mapping[str, float]], limit: float) -> str:
    """Whether all are under the limit; undecided where an interval reaches to both sides of it."""
    if all(one["high"] < limit for one in found):
        return "met"
    return "not met" if any(one["low"] > limit for one in found) else "undecided"


def instructions_of(row: Mapping[str, Any], pair: str) -> str:
    if "instructions" not in row:
        return "-"
    one, base = pair.split(" / ")
    return f"{row['instructions'][one] / row['instructions'][base]:.3f}"


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    rows = result["rows"]
    labels = {
        NOTHING_MARKED: "nothing is donated",
        ALL_REPLACED: "all tensors are replaced",
        BESIDE: "one tensor, beside live ones",
        BESIDE_READ: "one tensor, beside live ones that an earlier step has read",
    }
    verdicts = "; ".join(f"{aim['text']}: {aim['verdict']}" for aim in result["aims"])
    costs = [row for row in rows if "beside" not in row["case"]]
    live = [row for row in rows if "beside" in row["case"]]
    return {
        "steps": _common.Table(
            "step_cost: a step relative to another, medians of the ratios of each round (95%)",
            ("step", "tensors", "ratio of", "wall time", "processor time", "instructions"),
            [
                (
                    labels[row["case"]],
                    f"{row['tensors']:,}",
                    pair,
                    *(_common.shown(clocks[clock]) for clock in ("wall", "processor")),
                    instructions_of(row, pair),
                )
                for row in costs
                for pair, clocks in row["ratios"].items()
            ],
            f"Aims: {verdicts}.",
        ),
        "live_tensors": _common.Table(
            "step_cost: beside live tensors that the step does not read, processor time (95%) and instructions",
            ("step", "live tensors", "on / off", "ns for each", "instructions for each", "torch_xla's own"),
            [
                (
                    labels[row["case"]],
                    f"{row['tensors']:,}",
                    _common.shown(row["ratios"]["on / off"]["thread"], 2),
                    _common.shown(row["auto_ns_for_each"], 0) if "auto_ns_for_each" in row else "",
                    *(
                        f"{row[key]:,.0f}" if key in row else ""
                        for key in ("auto_instructions_for_each", "stock_instructions_for_each")
                    ),
                )
                for row in live
            ],
        ),
    }


@click.command()
@click.option("--child", "as_child", hidden=True)
@_common.tiny_option
@_common.results_option
def main(as_child: str | None, tiny: bool, results: Path) -> None:
    """Cost of the hooks and of donation for a step; some minutes, most of them under valgrind."""
    if as_child is not None:
        child(json.loads(as_child))
        return
    sizes = TINY_SIZES if tiny else SIZES
    # Each sample begins with a collection, which then need not go through all modules.
    gc.freeze()
    rows = time_all(sizes)
    counts = can_count(tiny)
    if counts:
        keys = [(case, count) for case, count, *_ in sizes if "beside" in case or count <= MOST_PARAMETERS_COUNTED]
        add_instructions(rows, per_step(under_valgrind(__file__, keys)))
    largest = [
        row["auto_ns_for_each"]
        for row in rows
        if row.get("tensors") == max(size for _, size, *_ in sizes)
        if "auto_ns_for_each" in row
    ]
    result = _common.describe("step_cost", {"tiny": tiny})
    result["instructions"] = "of the thread that steps, by callgrind" if counts else "not counted: needs valgrind"
    result["rows"] = rows
    result["aims"] = [
        {
            "text": "nothing donated: less than 1% of a step",
            "verdict": verdict(
                [row["ratios"]["hooked / unhooked"]["wall"] for row in rows if row["case"] == NOTHING_MARKED],
                1 + HOOKS_AIM,
            ),
        },
        {
            "text": f"auto_donate(): under {AUTO_AIM_NS} ns for each of the most live tensors",
            "verdict": verdict(largest, AUTO_AIM_NS),
        },
    ]
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
