"""Runs the benchmarks, each in a separate process; all of them, or those named. Then writes the tables of the docs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import _common
import click

BENCHMARKS = (
    "mark_cost",
    "call_cost",
    "step_cost",
    "growth",
    "auto_patterns",
    "example_bits",
    "last_bits",
    "moved_tensors",
    "donation_copies",
    "jax_side_by_side",
    "overlap",
    "first_call",
    "demo",
)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(BENCHMARKS))
@_common.tiny_option
@_common.results_option
def main(names: tuple[str, ...], tiny: bool, results: Path) -> None:
    """Measures; prints tables, and writes a JSON file for each benchmark."""
    failed = []
    for name in names or BENCHMARKS:
        command = [sys.executable, str(_common.FOLDER / f"{name}.py"), "--results", str(results)]
        if subprocess.run([*command, "--tiny"] if tiny else command, check=False).returncode != 0:
            failed.append(name)
    if not tiny and results == _common.RESULTS:
        subprocess.run([sys.executable, str(_common.FOLDER / "write_docs.py")], check=True)
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
