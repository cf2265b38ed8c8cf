"""Runs a training script once for each mode, in fresh processes, and shows how the runs compare."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from _measure import WARM_UP, Result
from _tpu import print_reuse
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from torch_xla_donate import hlo

_MIB = 2**20
_ROWS = 6
_COLOURS = ("#c0504d", "#2e75b6", "#5b9a3c")


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: what it measured in its process, and the HLO of its step."""

    result: Result
    step: hlo.DumpedModule

    @property
    def mode(self) -> str:
        return self.result.mode

    @property
    def planned_bytes(self) -> int:
        return planned_bytes(self.step)


@dataclasses.dataclass(frozen=True)
class Demo:
    """The script to run, and the names for its output.

    Attributes:
        script: takes the arguments of a mode, and `--result FILE`, to which it writes its `Result`.
        modes: the runs, each with its arguments. They are compared with the first.
        steps: of each run.
        data: what it trains on, for the headline.
        state: what the state consists of.
        title: of the picture.
        score: the name of `Result.accuracy`; empty if there is none.
        curve: whether the picture has the loss of each step, too.
    """

    script: Path
    modes: Mapping[str, Sequence[str]]
    steps: int
    data: str
    state: str
    title: str
    score: str = ""
    curve: bool = False


def compare(demo: Demo, out: Path) -> int:
    """Runs the modes, prints the comparison, and writes the picture and the numbers to `out`.

    Returns the exit code: 0 if all runs computed the same values bit for bit, 1 if not.
    """
    # Tables of 100 columns where the terminal's width is not known.
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    console.print(f"{demo.script.name}: {demo.steps} steps on {demo.data}, each mode in a separate process\n")
    runs = _run_all(console, demo, out)
    if runs is None:
        return 1

    same = _print_values(console, runs)
    _print_hlo(console, runs)
    reuse = print_reuse(console, {run.mode: run.step for run in runs})
    console.print()
    _print_costs(console, demo, runs)
    for run in runs:
        if run.step.donors:
            console.print(f"donation_report(steps=1) of {run.mode!r}:", style="bold")
            console.print(run.result.report, soft_wrap=True, markup=False)
            console.print()
    picture, numbers = (out / f"{demo.script.stem}{suffix}" for suffix in (".png", ".json"))
    _draw(demo, runs, picture)
    found = [{**_numbers(run), **reuse[run.mode]} for run in runs]
    numbers.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"memory over the steps: {picture}", soft_wrap=True)
    console.print(f"all numbers:           {numbers}", soft_wrap=True)
    return 0 if same else 1


def _run_all(console: Console, demo: Demo, out: Path) -> list[Run] | None:
    """The runs one after the other; None, and the reason printed, if one of them fails."""
    columns = (TextColumn("{task.description:>7}"), BarColumn(), TextColumn("{task.fields[line]}"), TimeElapsedColumn())
    runs: list[Run] = []
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for mode, arguments in demo.modes.items():
            task = progress.add_task(mode, total=demo.steps, line="starting ...")
            folder = out / f"{demo.script.stem}_{mode}"
            # XLA numbers its modules from 0 in each process: a dump of an earlier run would mix with this one's.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            result = folder / "result.json"
            command = [sys.executable, str(demo.script), *arguments, "--result", str(result)]
            exit_code = _run_one(command, folder / "hlo", progress, task)
            if exit_code:
                console.print(f"the run {mode!r} failed with exit code {exit_code}", style="bold red")
                return None
            runs.append(Run(Result.load(result), step_module(folder / "hlo")))
    return runs


def _run_one(command: Sequence[str], dump: Path, progress: Progress, task: TaskID) -> int:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text".strip()
    environment = {"PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "XLA_FLAGS": flags}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if progress.disable:
                print(line, end="", flush=True)
            else:
                progress.update(task, advance=1, line=line.partition("step")[2].strip())
    return child.returncode


def planned_bytes(step: hlo.DumpedModule) -> int:
    """The bytes that XLA planned for a step on a device: inputs, outputs and temporaries."""
    assert step.after is not None and step.after.path is not None, "the step was not compiled"
    path = step.after.path
    text = path.with_name(f"{path.stem}-memory-usage-report.txt").read_text(encoding="utf-8")
    found = re.match(r"Total bytes used: (\d+)", text)
    assert found is not None, f"no total in {path.name}'s memory report: {text[:60]!r}"
    return int(found[1])


def step_module(dump: Path) -> hlo.DumpedModule:
    """The step of a loop among the modules of a run: the last one with the largest input."""

    def input_bytes(module: hlo.DumpedModule) -> int:
        compiled = module.after or module.before
        return 0 if compiled is None else sum(shape.bytes for shape in compiled.parameters)

    return max(reversed(hlo.read_dump(dump)), key=input_bytes)


def _print_values(console: Console, runs: Sequence[Run]) -> bool:
    """Compares each run's values with those of the first."""
    first = runs[0].result
    same = True
    for run in runs[1:]:
        for what, equal in (
            (f"{len(first.losses)} losses", run.result.losses == first.losses),
            (f"{first.state_tensors} tensors of the last state", run.result.digest == first.digest),
        ):
            same &= equal
            verdict = "[green]identical bit for bit[/]" if equal else "[bold red]NOT identical[/]"
            console.print(f"{what} of {first.mode!r} and {run.mode!r}: {verdict}")
    console.print()
    return same


def _print_hlo(console: Console, runs: Sequence[Run]) -> None:
    """The donors and aliases in XLA's own dump of the step."""
    table = _table("In the HLO of the step", runs)
    _row(table, "buffer_donor, before optimisation", [f"{len(run.step.donors)}" for run in runs])
    _row(table, "input_output_alias, after it", [f"{len(run.step.aliases)}" for run in runs])
    _row(table, "bytes donated", [_mib(run.step.donated_bytes) for run in runs])
    _row(table, "bytes aliased", [_mib(run.step.aliased_bytes) for run in runs])
    console.print(table)
    for run in runs:
        # The largest first, since they save most memory.
        aliases = sorted(run.step.aliases, key=lambda alias: -run.step.shape_of(alias).bytes)
        if not aliases:
            continue
        console.print(f"{run.mode!r}, the largest of {len(aliases)} aliases:")
        for alias in aliases[:_ROWS]:
            shape = run.step.shape_of(alias)
            output = ",".join(map(str, alias.output_index))
            text = f"  parameter {alias.parameter_number:2d} -> output {output:>2s}  {shape}  {_mib(shape.bytes)}"
            console.print(text, markup=False)
        crossed = [(old, new) for old, new in run.result.moves.items() if old != new]
        text = f"  {len(run.result.moves) - len(crossed)} of the new tensors are in their own old memory"
        text += "".join(f", {new} in that of {old}" for old, new in crossed[:2])
        text += f", {len(crossed) - 2} more in that of others" if len(crossed) > 2 else ""
        console.print(text, markup=False, soft_wrap=True)
    console.print()


def _print_costs(console: Console, demo: Demo, runs: Sequence[Run]) -> None:
    first = runs[0].result
    table = _table(f"Cost of a step, from step {WARM_UP + 1} on", runs)
    _row(table, f"state ({demo.state})", [_mib(run.result.state_bytes) for run in runs])
    _row(table, "memory of the step per device, as XLA planned it", [_mib(run.planned_bytes) for run in runs])
    _row(table, "peak memory, as measured", [_mib(run.result.peak) for run in runs])
    _row(table, f"  less than {first.mode!r}", [_mib(first.peak - run.result.peak) for run in runs])
    _row(table, "time per step, median", [f"{run.result.step_seconds * 1000:.0f} ms" for run in runs])
    ratios = [f"{first.step_seconds / run.result.step_seconds:.2f} x" for run in runs]
    _row(table, f"  times as fast as {first.mode!r}", ratios)
    _row(
        table,
        "buffers that kept their pointers, each step",
        [f"{min(run.result.kept[WARM_UP:])} of {run.result.state_tensors}" for run in runs],
    )
    if demo.score:
        _row(table, demo.score, [f"{run.result.accuracy:.1%}" for run in runs])
    console.print(table)
    console.print(
        "Peak memory: the process's resident memory (VmHWM, reset at each step, and VmRSS every 2 ms), less what it had"
        " before the state was made. It includes compiled code, and freed arrays that malloc keeps. The planned memory"
        " falls by less than the bytes aliased, because gradients and activations now need separate memory. Without"
        " donation XLA computes them in the memory of the new outputs, as far as they fit.\n",
        style="dim",
    )


def _table(title: str, runs: Sequence[Run]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for run in runs:
        table.add_column(run.mode, justify="right")
    return table


def _row(table: Table, label: str, cells: Sequence[str]) -> None:
    table.add_row(label, *cells)


def _mib(count: int) -> str:
    return f"{count / _MIB:.1f} MiB"


def _numbers(run: Run) -> dict[str, object]:
    """The numbers of a run, for tests and scripts."""
    result = run.result
    return {
        "mode": run.mode,
        "losses": result.losses,
        "digest": result.digest,
        "state_tensors": result.state_tensors,
        "state_bytes": result.state_bytes,
        "donors": len(run.step.donors),
        "aliases": len(run.step.aliases),
        "donated_bytes": run.step.donated_bytes,
        "aliased_bytes": run.step.aliased_bytes,
        "planned_bytes": run.planned_bytes,
        "peak_bytes": result.peak,
        "step_seconds": result.step_seconds,
        "kept_pointers": result.kept,
        "accuracy": result.accuracy,
    }


def _draw(demo: Demo, runs: Sequence[Run], path: Path) -> None:
    """Memory over the steps of all runs, with their peaks."""
    # Here, not above: the runs import this file too, and need no plotting library in their memory.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first, steps = runs[0].result, len(runs[0].result.seconds)
    if demo.curve:
        figure, (losses, axes) = pyplot.subplots(2, figsize=(10, 8.1), height_ratios=(1, 2), layout="constrained")
        for run, colour, style in zip(runs, _COLOURS, ("-", "--", ":")):
            values = [float.fromhex(loss) for loss in run.result.losses]
            losses.plot(range(1, steps + 1), values, style, color=colour, label=run.mode)
        losses.set_title("Loss of each step; the curves lie on one another")
        losses.set_xlim(0.5, steps * 1.23 + 1)
        losses.set_xticks(range(1, steps + 1, max(1, steps // 20)))
        losses.grid(axis="y", alpha=0.3)
        losses.legend()
    else:
        figure, axes = pyplot.subplots(figsize=(10, 5.4), layout="constrained")
    for run, colour in zip(runs, _COLOURS):
        result = run.result
        at, used = zip(*result.trace)
        label = f"{run.mode}: peak {result.peak / _MIB:.0f} MiB, {len(run.step.aliases)} aliases"
        # Step n lies between n - 1/2 and n + 1/2.
        axes.plot([x + 0.5 for x in at], [y / _MIB for y in used], color=colour, linewidth=1.2, label=label)
        axes.hlines(result.peak / _MIB, 0.5, steps + 0.5, color=colour, linestyle="--", linewidth=1)
    state = first.state_bytes / _MIB
    axes.axhline(state, color="0.45", linestyle=":", linewidth=1, label=f"the state itself: {state:.0f} MiB")
    best = min(runs, key=lambda run: run.result.peak)
    saved = (first.peak - best.result.peak) / _MIB
    if saved > 0:
        ends = {"xy": (steps + 1.0, best.result.peak / _MIB), "xytext": (steps + 1.0, first.peak / _MIB)}
        axes.annotate("", **ends, arrowprops={"arrowstyle": "<->", "color": "0.2"})
        middle = (first.peak + best.result.peak) / 2 / _MIB
        text = f"{saved:.0f} MiB less\n({best.step.aliased_bytes / _MIB:.0f} MiB aliased)"
        axes.text(steps + 1.2, middle, text, va="center")
    axes.set_title(demo.title)
    axes.set_xlabel("step")
    axes.set_ylabel("resident memory above the start [MiB]")
    axes.set_xlim(0.5, steps * 1.23 + 1)
    axes.set_ylim(0, max(run.result.peak for run in runs) / _MIB * 1.32)
    axes.set_xticks(range(1, steps + 1, max(1, steps // 20)))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", ncols=2)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
