"""Writes the measured numbers of README and docs from the result files; `make bench` calls it at its end.

A table stands between `<!-- benchmarks: NAME -->` and `<!-- end -->`. The names are those of the tables that the
benchmarks make, and

    files           when, of which commit and on what each result was measured
    measured NAME   the same for one result, as a sentence
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
            found[f"measured {name}"] = measured(result)
            if name == "llama":
                model = importlib.import_module("_memory_model")
                found |= {"llama": model.table(result["rows"]), "llama_savings": model.savings(result["rows"])}
            else:
                tables = importlib.import_module(name).tables(result)
                found |= {key: table.for_docs() for key, table in tables.items()}
    finally:
        del sys.path[:2]
    return found


def written(text: str, found: Mapping[str, str]) -> str:
    """A page with the numbers of these blocks.

    Raises:
        click.ClickException: the page has a block that is not among them.
    """

    def block(match: re.Match[str]) -> str:
        if match[1] not in found:
            raise click.ClickException(f"no result has the block {match[1]!r}; there are {', '.join(sorted(found))}")
        return match[1] + match[2] + found[match[1]]

    return BLOCK.sub(block, text)


@click.command()
@click.option("--check", is_flag=True, help="Change nothing; exit with 1 if a page has other numbers.")
def main(check: bool) -> None:
    """Numbers of README and docs."""
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
