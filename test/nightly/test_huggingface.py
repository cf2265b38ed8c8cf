"""examples/huggingface.py with all its programs: its table is the one that docs/examples.md shows."""

from __future__ import annotations

from pathlib import Path

from children import run_file
from helpers import needs_jax

ROOT = Path(__file__).resolve().parents[2]


@needs_jax
def test_the_page_shows_what_each_way_reuses_of_a_llama(tmp_path: Path) -> None:
    """The example exits with 1 if losses or tokens differ by a bit."""
    example = run_file(ROOT / "examples" / "huggingface.py", "--out", str(tmp_path), exit_code=0, timeout=1800)
    printed = "".join(f"{line.rstrip()}\n" for line in example.stdout.splitlines())
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert f"```console\n$ python examples/huggingface.py\n{printed}```" in page
