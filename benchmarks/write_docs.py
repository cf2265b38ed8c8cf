"""Writes the measured numbers of README and docs from the result files; `make bench` calls it at its end.

A block of a page stands between `<!-- benchmarks: NAME -->` and `<!-- end -->`. Its name is one of

    BENCHMARK TABLE       a table that `tables()` of the benchmark makes from its result
    BENCHMARK measured    when, of which commit and on what it was measured
    files                 the same of all results, as a table
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _common
import click

ROOT = _common.FOLDER.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block without an end stops at the next one, and stays as it is.
BLOCK = re.compile(r"(?<=<!-- benchmarks: )([\w ]+)( -->\n)(?:(?!<!-- benchmarks: ).)*?(?=<!-- end -->)", re.DOTALL)
# Packages, in the order of the columns.
PACKAGES = ("torch", "torch_xla", "jax", "python")


def measured(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in PACKAGES if name in result["versions"])
    commit = f"commit {result['commit']}" if result["commit"] else "commit not noted"
    cpu = f"{result['cpu'] or 'CPU not noted'}, {result['cores']} cores"
    return f"Measured on {result['date']} by `{result['command']}`: {commit}, {cpu}, {versions}.\n"


def files(results: Mapping[str, Mapping[str, Any]]) -> str:
    return _common.Table(
        "when and on what each result was measured",
        ("command", "date", "commit", "CPU", "cores", *PACKAGES),
        [
            [
                *(f"`{found['command']}`", found["date"], found["commit"] or "-", found["cpu"] or "-"),
                *(str(found["cores"]), *(found["versions"].get(package, "") for package in PACKAGES)),
            ]
            for found in results.values()
        ],
    ).for_docs()


def blocks(folder: Path = _common.RESULTS) -> dict[str, str]:
    """The text of each block that a page may have."""
    results = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    found = {"files": files(results)}
    sys.path[:0] = [str(_common.FOLDER), str(ROOT / "examples")]
    try:
        for name, result in results.items():
            if name == "llama":
                model = importlib.import_module("_memory_model")
                texts = {"sums": model.table(result["rows"]), "savings": model.savings(result["rows"])}
            else:
                tables = importlib.import_module(name).tables(result)
                texts = {key: table.for_docs() for key, table in tables.items()}
            found |= {f"{name} {key}": text for key, text in {**texts, "measured": measured(result)}.items()}
    finally:
        del sys.path[:2]
    return found


def block(name: str, found: Mapping[str, str]) -> str:
    """The text of a block.

    Raises:
        click.ClickException: no result has it, although its benchmark has been run, or there is no such benchmark.
    """
    if name in found:
        return found[name]
    benchmark = name.partition(" ")[0]
    is_measured = any(known.startswith(f"{benchmark} ") for known in found)
    if is_measured or not (_common.FOLDER / f"{benchmark}.py").exists():
        raise click.ClickException(f"no result has the block {name!r}; there are {', '.join(sorted(found))}")
    return f"Not measured yet: `python benchmarks/{benchmark}.py`.\n"


def written(text: str, found: Mapping[str, str]) -> str:
    """A page with the numbers of these blocks."""
    return BLOCK.sub(lambda match: match[1] + match[2] + block(match[1], found), text)


def refuse_old_results(folder: Path, commit: str | None) -> None:
    """Raises click.ClickException if there is no result, or one was not measured on this commit."""
    measured = {path.name: json.loads(path.read_text(encoding="utf-8"))["commit"] for path in folder.glob("*.json")}
    old = [name for name, found in sorted(measured.items()) if found is None or found != commit]
    if old or not measured:
        raise click.ClickException(f"not measured on commit {commit}: {', '.join(old) or 'any result'}")


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if a page has other numbers.")
@click.option("--fresh", is_flag=True, help="First, exit with 1 if a result is of another commit than the sources.")
def main(check: bool, fresh: bool) -> None:
    """Numbers of README and docs."""
    if fresh:
        refuse_old_results(_common.RESULTS, _common.commit())
    found, stale = blocks(), []
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = written(old, found)
        if new != old:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new, encoding="utf-8")
    if check and stale:
        raise click.ClickException(f"other numbers than in the result files: {', '.join(stale)}")
    click.echo(f"{'stale' if check else 'written'}: {', '.join(stale) or 'no page'}")


if __name__ == "__main__":
    main()
