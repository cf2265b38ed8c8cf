"""Runs test files of pytorch/xla with automatic donation and without it: python test/upstream/run.py CHECKOUT."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
GOOD = {"passed", "failed as expected"}


@dataclass
class Case:
    """A line of cases.txt."""

    text: str
    env: dict[str, str]
    file: str
    arguments: list[str]


@dataclass
class Run:
    """The outcome of one process."""

    outcomes: dict[str, str] = field(default_factory=dict)  # by the test's name
    auto: bool | None = None  # whether donation was on; None without the package
    steps: int | None = None  # how many have donated; None if the process did not come to its end
    exit_code: int | None = None  # None if it ran out of time
    last_line: str = ""  # of stderr

    @property
    def good(self) -> set[str]:
        return {test for test, outcome in self.outcomes.items() if outcome in GOOD}

    @property
    def counts(self) -> str:
        skipped = sum(outcome == "skipped" for outcome in self.outcomes.values())
        return f"{len(self.good)} / {len(self.outcomes) - len(self.good) - skipped} / {skipped}"

    @property
    def end(self) -> str:
        return "ran out of time" if self.exit_code is None else f"exit code {self.exit_code}"


def parse(line: str) -> Case:
    words = shlex.split(line)
    env = {}
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    if not words:
        raise click.ClickException(f"no file is named in {line!r}")
    return Case(line, env, words[0], words[1:])


def listed() -> list[str]:
    lines = (FOLDER / "cases.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def run(case: Case, path: Path, auto: bool, timeout: float, log: Path) -> Run:
    """Runs the file as a program, as upstream does, in a separate process."""
    with tempfile.TemporaryDirectory() as scratch:
        record = Path(scratch, "record")
        record.touch()
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_XLA_DONATE_")}
        env.update({"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1", **case.env})
        env["UPSTREAM_RECORD"] = str(record)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER / "startup"), env.get("PYTHONPATH", "")]))
        if auto:
            env["TORCH_XLA_DONATE_AUTO"] = "1"
        found = Run()
        with log.open("w", encoding="utf-8") as output:
            child = subprocess.Popen(
                [sys.executable, str(path), *case.arguments],
                env=env,
                cwd=scratch,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                found.exit_code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        for line in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
            if "test" in line:
                # Of a test with several subtests the failure counts.
                if found.outcomes.get(line["test"]) not in ("failed", "error"):
                    found.outcomes[line["test"]] = line["outcome"]
            elif "auto" in line:
                found.auto = line["auto"]
            else:
                found.steps = line["steps"]
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    found.last_line = lines[-1] if lines else ""
    return found


def error_of(without: Run, with_auto: Run) -> str:
    """Why the comparison says nothing; empty if it does."""
    if not without.good:
        return f"no test passes without automatic donation ({without.end}): {without.last_line}"
    if without.auto is not None:
        return "the package was imported without automatic donation, too"
    if not with_auto.auto:
        return f"automatic donation was not on ({with_auto.end}): {with_auto.last_line}"
    return ""


def failing_with_auto(without: Run, with_auto: Run) -> list[str]:
    """The tests that pass only without automatic donation, each with its outcome."""
    failing = [f"{test}: {with_auto.outcomes.get(test, 'not run')}" for test in sorted(without.good - with_auto.good)]
    if not failing and with_auto.exit_code != without.exit_code:
        failing.append(f"{with_auto.end}, without automatic donation {without.end}")
    return failing


@click.command()
@click.argument("checkout", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("cases", nargs=-1)
@click.option("--timeout", default=3600.0, show_default=True, help="Seconds for one file, one way.")
@click.option("--logs", type=click.Path(file_okay=False, path_type=Path), help="A folder that keeps all output.")
def main(checkout: Path, cases: tuple[str, ...], timeout: float, logs: Path | None) -> None:
    """Exits with 1 if a test passes without automatic donation and not with it.

    CHECKOUT is a folder with the test folder of pytorch/xla, of the version that is installed. CASES are lines as in
    cases.txt, which are run if there are none. Nothing is downloaded; what the files import has to be there.
    """
    table = Table(title="passed / failed / skipped")
    for column in ("file", "without", "with", "donating steps"):
        table.add_column(column, overflow="fold", justify="left" if column == "file" else "right")
    trouble: list[str] = []
    console = Console()
    with tempfile.TemporaryDirectory() as scratch:
        logs = logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        for number, case in enumerate(map(parse, cases or listed())):
            path = (checkout / "test" / case.file).resolve()
            if not path.is_file():
                trouble.append(f"{case.text}: there is no such file in {checkout / 'test'}")
                continue
            stem = f"{number:02}_{path.stem}"
            without, with_auto = (
                run(case, path, auto, timeout, logs / f"{stem}_{'with' if auto else 'without'}.log")
                for auto in (False, True)
            )
            steps = "?" if with_auto.steps is None else str(with_auto.steps)
            table.add_row(case.text, without.counts, with_auto.counts, steps)
            progress = f"{case.text}: {without.counts} without, {with_auto.counts} with, {steps} donating steps"
            console.print(progress, markup=False, highlight=False, soft_wrap=True)
            error = error_of(without, with_auto)
            failing = [error] if error else failing_with_auto(without, with_auto)
            for text in failing:
                console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)
            trouble += [f"{case.text}: {text}" for text in failing]
    console.print(table)
    for line in trouble:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if trouble:
        raise SystemExit(1)
    console.print("Every test that passes without automatic donation passes with it.")


if __name__ == "__main__":
    main()
