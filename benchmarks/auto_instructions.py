"""Counts the instructions that auto_donate() adds to a step, by valgrind. Each run gives the same numbers."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import auto_cost
import click

import torch_xla_donate
from torch_xla_donate import _host

CONTROL, VALGRIND = "callgrind_control", "valgrind"


def control(command: str) -> None:
    subprocess.run([CONTROL, command, str(os.getpid())], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def counted(name: str, repeat: int, prepare: Callable[[], Any], step: Callable[[], Any]) -> None:
    """Dumps what ``repeat`` steps take under this name, after three that do not count."""
    prepare()
    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    warm = _common.compiles()
    control("--instr=on")
    control("--zero")
    for _ in range(repeat):
        step()
    control(f"--dump={name}")
    control("--instr=off")  # which forgets what has been counted
    gc.enable()
    if _common.compiles() != warm:
        raise RuntimeError(f"{name}: compiled while counting; expected a warm graph")


def child(sizes: Sequence[int], replaced: Sequence[int], repeat: int) -> None:
    """The process that is counted."""
    gc.freeze()
    for read in (False, True):
        for count in sizes:
            others = auto_cost.live(count, read)
            one = auto_cost.multiply(_common.small_tensors(1))
            for name, prepare in (("on", auto_cost.on), ("off", auto_cost.off)):
                counted(f"{count} {read} {name}", repeat, prepare, one)
            _host.uninstall_hooks()
            try:
                counted(f"{count} {read} unhooked", repeat, auto_cost.off, one)
            finally:
                _host.install_hooks()
            del others, one
    for count in replaced:
        for name, prepare, before in (
            ("auto", auto_cost.on, None),
            ("by hand", auto_cost.off, torch_xla_donate.donate_buffer),
            ("not donated", auto_cost.off, None),
        ):
            step = auto_cost.multiply(_common.small_tensors(count), before)
            counted(f"replaced {count} {name}", repeat, prepare, step)
            del step


def totals(folder: Path) -> dict[str, int]:
    """Instructions of the thread that steps, by the name of the dump."""
    found = {}
    for path in folder.glob("counts.*-01"):
        lines = path.read_text(encoding="utf-8").splitlines()
        heads = dict(line.split(": ", 1) for line in lines[:40] if ": " in line)
        trigger = next((line for line in lines[:40] if line.startswith("desc: Trigger: dump ")), None)
        if trigger is not None:
            found[trigger.removeprefix("desc: Trigger: dump ")] = int(heads["summary"])
    return found


def count(sizes: Sequence[int], replaced: Sequence[int], repeat: int) -> Mapping[str, float]:
    """Runs the child under valgrind; instructions a step by name."""
    for program in (VALGRIND, CONTROL):
        if shutil.which(program) is None:
            raise click.ClickException(f"{program} is needed to count instructions; install valgrind (3.19 was used)")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            VALGRIND, "--tool=callgrind", "--instr-atstart=no", "--separate-threads=yes", "-q",
            f"--callgrind-out-file={folder}/counts", sys.executable, __file__,
            "--child", json.dumps([list(sizes), list(replaced), repeat]),
        ]  # fmt: skip
        done = subprocess.run(command, check=False)
        if done.returncode != 0:
            raise click.ClickException(f"the process under valgrind ended with {done.returncode}; see above")
        return {name: total / repeat for name, total in totals(Path(folder)).items()}


@click.command()
@click.option("--child", "as_child", hidden=True)
@_common.tiny_option
@_common.results_option
def main(as_child: str | None, tiny: bool, results: Path) -> None:
    """Cost of automatic donation in instructions; takes some minutes, as valgrind interprets them."""
    if as_child is not None:
        child(*json.loads(as_child))
        return
    sizes = (0, 2, 20) if tiny else (0, 100, 1_000, 10_000)
    replaced = (2, 3) if tiny else (100, 1_000)
    found = count(sizes, replaced, repeat=2 if tiny else 5)

    def extra(size: int, read: bool) -> float:
        return found[f"{size} {read} on"] - found[f"{size} {read} off"]

    live = [
        {
            "live": size,
            "read_before": read,
            "step": {name: found[f"{size} {read} {name}"] for name in ("on", "off", "unhooked")},
            "for_each": (extra(size, read) - extra(0, read)) / size,
            "by_torch_xla": (found[f"{size} {read} unhooked"] - found[f"0 {read} unhooked"]) / size,
            "off_over_unhooked": found[f"{size} {read} off"] / found[f"{size} {read} unhooked"],
        }
        for read in (False, True)
        for size in sizes
        if size
    ]
    result = _common.describe("auto_instructions", "python benchmarks/auto_instructions.py", {"tiny": tiny})
    result["counted"] = "instructions of the thread that steps, by callgrind"
    result["live_tensors"] = live
    result["all_replaced"] = [
        {
            "parameters": size,
            **{name.replace(" ", "_"): found[f"replaced {size} {name}"] for name in ("auto", "by hand", "not donated")},
        }
        for size in replaced
    ]
    _common.finish(
        results,
        result,
        _common.table_of(
            "auto_instructions: beside live tensors that the step does not read, instructions for each of them",
            ("live tensors", "auto_donate()", "torch_xla itself", "a step, off / unhooked"),
            [
                (
                    f"{row['live']:,}, {'read before' if row['read_before'] else 'never read'}",
                    f"{row['for_each']:,.0f}",
                    f"{row['by_torch_xla']:,.0f}",
                    f"{row['off_over_unhooked']:.3f}",
                )
                for row in live
            ],
        ),
        _common.table_of(
            "auto_instructions: a step that replaces all parameters, thousands of instructions",
            ("parameters", "not donated", "by hand", "auto"),
            [
                (
                    f"{row['parameters']:,}",
                    *(f"{row[name] / 1e3:,.0f}" for name in ("not_donated", "by_hand", "auto")),
                )
                for row in result["all_replaced"]
            ],
        ),
    )


if __name__ == "__main__":
    main()
