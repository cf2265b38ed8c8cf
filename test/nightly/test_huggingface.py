"""examples/huggingface.py with all its programs: its table is the one that docs/examples.md shows."""

from __future__ import annotations

from pathlib import Path

from children import run_file
from helpers import ROOT, console, needs_jax


@needs_jax
def test_the_page_shows_what_each_way_reuses_of_a_llama(tmp_path: Path) -> None:
    """The example exits with 1 if losses or tokens differ by a bit."""
    example = run_file(ROOT / "examples" / "huggingface.py", "--out", str(tmp_path), exit_code=0, timeout=1800)
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert console("python examples/huggingface.py", example.stdout) in page
