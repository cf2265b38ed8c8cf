"""Helpers of the benchmarks: fair comparisons, resident memory, result files and tables."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import rich.table
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from rich.console import Console
from rich.markup import escape

import torch_xla_donate
from torch_xla_donate import hlo

# torch_xla reads the first two when the first tensor is made, and JAX the last one when it is imported.
os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["JAX_PLATFORMS"] = "cpu"

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
MIB = 1 << 20

Timed = Callable[[], float]


def step() -> None:
    """Runs the pending work, to its end."""
    torch_xla.sync(wait=True)
    # sync() waits until the device has the work, not until it is done.
    xm.wait_device_ops()


@contextlib.contextmanager
def dumped_step(run: Callable[..., Any], *arguments: Any) -> Iterator[tuple[Any, hlo.HloModule, str]]:
    """Calls a function in a process that starts the runtime itself and dumps HLO, as long as the context lasts.

    Yields what the function returns; the step as XLA has optimised it, which is the module with the largest inputs that
    was compiled last; and its text.
    """
    # The server has imported torch_xla and started nothing of it: its children need not import it again.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch_xla", "torch_xla_donate"])
    with tempfile.TemporaryDirectory() as dump:
        answers = context.SimpleQueue()
        process = context.Process(target=_answer, args=(run, arguments, dump, answers))
        process.start()
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
            process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"the process of {arguments} ended with {process.exitcode}; see its output")
        modules = [module.after for module in hlo.read_dump(dump) if module.after is not None]
        step = max(reversed(modules), key=lambda module: sum(shape.bytes for shape in module.parameters))
        assert step.path is not None
        yield answers.get(), step, step.path.read_text(encoding="utf-8")


def _answer(run: Callable[..., Any], arguments: Sequence[Any], dump: str, answers: Any) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_dump_hlo_as_text"
    answers.put(run(*arguments))


def side_by_side(variants: Mapping[str, Timed], rounds: int) -> dict[str, list[float]]:
    """Runs every variant once a round, in an order that turns each round; what each returned, round by round.

    Samples at the same index belong to the same round, so that `ratio` compares neighbours in time: what else the
    machine does drifts, and cancels out.
    """
    names = list(variants)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        shift = index // 2 % len(names)
        order = names[shift:] + names[:shift]
        for name in order if index % 2 == 0 else reversed(order):
            samples[name].append(variants[name]())
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median of the rounds' values, their quartiles, and a 95% bootstrap interval of the median."""
    values = sorted(values)
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(1000))
    return {
        "median": statistics.median(values),
        "quarter": values[len(values) // 4],
        "three_quarters": values[(3 * len(values)) // 4],
        "low": medians[25],
        "high": medians[974],
    }


def ratio(samples: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """`spread` of the rounds' ratios."""
    return spread([one / other for one, other in zip(samples, base)])


def shown(found: Mapping[str, float], digits: int = 3) -> str:
    """A ratio for people: '1.004 (0.998 to 1.010)', the interval being that of the median. A base is 1."""
    if found["low"] == found["high"] == 1:
        return "1"
    return f"{found['median']:.{digits}f} ({found['low']:.{digits}f} to {found['high']:.{digits}f})"


def wall(run: Callable[[], Any]) -> float:
    """Seconds that ``run`` takes, without Python's collector getting in between."""
    gc.disable()
    try:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    finally:
        gc.enable()


def small_tensors(count: int) -> list[torch.Tensor]:
    made = [torch.ones(2).to("xla") for _ in range(count)]
    step()
    return made


def compiles() -> int:
    return int(metrics.counter_value("UncachedCompile") or 0)


def resident() -> int:
    """Bytes of memory that this process has in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_peak() -> int:
    """The most `resident` has been since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


def forget_peak() -> None:
    """Lets `resident_peak` start again from now."""
    Path("/proc/self/clear_refs").write_text("5")


def trim() -> None:
    """Gives freed memory back to the system, so that `resident` counts what is in use."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def keep_no_freed_arrays() -> None:
    """glibc keeps freed memory, the more the larger the arrays were. With a fixed threshold it gives arrays back."""
    mmap_threshold = -3  # M_MMAP_THRESHOLD of mallopt(3)
    if ctypes.CDLL(None).mallopt(mmap_threshold, 1 << 16) != 1:
        raise RuntimeError("mallopt() refuses a threshold of 64 KiB")


class Worker:
    """A process that runs steps of one variant on request.

    It reads how many from each line of standard input, and answers with a line of JSON: once when it is ready, then
    for each line, and with its memory when there is no more input.
    """

    def __init__(self, variant: str, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._variant = variant

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"the process of {self._variant} ended with {self._process.wait()}; see its output above"
            )
        return json.loads(line)

    def steps(self, number: int) -> Any:
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)
        return self.answer()

    def memory(self) -> dict[str, int]:
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = dict(self.answer())
        self._process.wait()
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def cpu_model() -> str | None:
    """Where the kernel has it: /proc/cpuinfo names the model on x86-64, and not on arm64."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def commit() -> str | None:
    """Of the checkout that is measured, with a plus if its sources differ from the commit; None outside a checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FOLDER.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "csrc", "torch_xla_donate", "examples", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe(name: str, options: Mapping[str, Any], *packages: str, command: str = "") -> dict[str, Any]:
    """The head of a result file: what was run, of which commit, on what. No host names, no paths.

    Args:
        packages: whose versions count besides torch, torch_xla and this package.
        command: if it is not `python benchmarks/<name>.py`.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit(),
        "command": command or f"python benchmarks/{name}.py",
        "options": dict(options),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": f"{memory:.0f} GiB, {platform.machine()}, {platform.system()}",
        "versions": {
            "torch_xla_donate": torch_xla_donate.__version__,
            "torch": torch.__version__,
            **{package: importlib.metadata.version(package) for package in ("torch_xla", *packages)},
            "python": platform.python_version(),
        },
    }


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a result, for the console and for the docs. Its first column is text, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""

    def for_console(self) -> rich.table.Table:
        shown = rich.table.Table(title=self.title, title_justify="left", caption=self.caption, caption_justify="left")
        for index, column in enumerate(self.columns):
            shown.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*map(escape, row))
        return shown

    def for_docs(self) -> str:
        """In Markdown, without the title, which the page has."""
        rules = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = "".join(f"| {' | '.join(row)} |\n" for row in (self.columns, rules, *self.rows))
        return f"{lines}\n{self.caption}\n" if self.caption else lines


def aim(result: Mapping[str, Any]) -> str:
    return f"Aim: {result['aim']['text']}: {'met' if result['aim']['met'] else 'not met'}."


def finish(results: Path, result: Mapping[str, Any], tables: Mapping[str, Table]) -> None:
    """Prints the tables and writes ``results/<benchmark>.json``."""
    # A fixed width: in a pipe rich would use 80 columns and fold numbers.
    console = Console(width=120)
    for table in tables.values():
        console.print(table.for_console())
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{result['benchmark']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


tiny_option = click.option("--tiny", is_flag=True, help="The smallest sizes: shows that it runs, measures nothing.")
results_option = click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    help="Folder of the result file.  [default: benchmarks/results]",
)
