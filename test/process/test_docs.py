"""The Python blocks of the documentation run, and do what the texts after them say."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from children import run_file, run_in_child
from helpers import ROOT, console, needs_jax

import torch_xla_donate
from torch_xla_donate import _report


@dataclass
class Block:
    """A Python block of a page, and the text block that follows it, if one does."""

    line: int
    source: str
    expected: str | None


@dataclass
class Process:
    """Blocks that share a process."""

    env: dict[str, str] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)


FENCE = re.compile(
    r"(?:<!-- (?P<marker>fresh|env: [^>]*?) -->\n)?^```python\n(?P<source>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def processes(page: Path) -> list[Process]:
    """A comment before a block starts a new process: `<!-- fresh -->`, or `<!-- env: NAME=VALUE ... -->`."""
    text = page.read_text(encoding="utf-8")
    found: list[Process] = []
    for match in FENCE.finditer(text):
        marker = match["marker"]
        if marker is not None or not found or found[-1].env:
            settings = (marker or "").removeprefix("env: ").split() if marker != "fresh" else []
            found.append(Process(dict(setting.split("=", 1) for setting in settings)))
        found[-1].blocks.append(Block(text.count("\n", 0, match.start()) + 1, match["source"], match["text"]))
    return found


def cases() -> Iterator[object]:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for process in processes(page):
            uses_jax = any(re.search("import jax|v6e|compile_for", block.source) for block in process.blocks)
            skipped = [needs_jax] if uses_jax else []
            yield pytest.param(process, id=f"{page.relative_to(ROOT)}:{process.blocks[0].line}", marks=skipped)


def run_blocks(sources: list[str]) -> list[str]:
    """Runs blocks one after another; for each, what it printed, warned of and raised."""
    namespace = {"__name__": "__main__", "__file__": "example.py"}
    results = []
    for source in sources:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", torch_xla_donate.DonationWarning)
        warnings.showwarning = lambda message, category, *rest: print(f"{category.__name__}: {message}")
        _report.notices._warned_sites.clear()
        _report.notices._reported.clear()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(compile(source, "example.py", "exec"), namespace)
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
        results.append(out.getvalue())
    return results


@pytest.mark.parametrize("process", cases())
def test_the_blocks_of_a_page_run_and_say_what_the_page_says(process: Process) -> None:
    results = run_in_child(run_blocks, [block.source for block in process.blocks], env=process.env).value
    for block, result in zip(process.blocks, results, strict=True):
        if block.expected is None:
            assert "Error: " not in result, f"the block at line {block.line} raised: {result}"
        else:
            assert result.split() == block.expected.split(), f"the text after the block at line {block.line}"


def test_the_readme_shows_the_output_of_the_quickstart() -> None:
    output = run_file(ROOT / "examples" / "quickstart.py").stdout
    assert console("python examples/quickstart.py", output) in (ROOT / "README.md").read_text(encoding="utf-8")
