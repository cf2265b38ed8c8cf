"""examples/huggingface.py with all its programs, and `make llama` at 1B."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from children import run_file
from helpers import ROOT, console, import_from, needs_jax


@needs_jax
def test_the_page_shows_what_each_way_reuses_of_a_llama(tmp_path: Path) -> None:
    """docs/examples.md shows its table. The example exits with 1 if losses or tokens differ by a bit."""
    example = run_file(ROOT / "examples" / "huggingface.py", "--out", str(tmp_path), exit_code=0, timeout=1800)
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert console("python examples/huggingface.py", example.stdout) in page


@needs_jax
@pytest.mark.parametrize("way", ["functional", "in-place", "by-hand"])
def test_the_formula_is_right_for_1b_on_16_devices(way: str) -> None:
    """The TPU compiler's answer, in each way."""
    model = import_from("examples", "_memory_model")
    words = ("--size", "1b", "--devices", "16", "--topology", "v6e:4x4", "--way", way, "--json")
    done = run_file(ROOT / "examples" / "llama.py", *words, env={"CPU_NUM_DEVICES": "16"}, timeout=3600)
    row = json.loads(done.last_line)
    size, donates = model.SIZES["1b"], way != "functional"
    assert row["memory"]["argument_bytes"] == model.arguments(size, 16)
    assert row["memory"]["output_bytes"] == model.outputs(size, 16, "v6e")
    assert row["memory"]["alias_bytes"] == (model.state(size, 16) if donates else 0)
    expected = model.total(size, 16, "v6e:4x4", donates) / model.measured(row)
    assert 0.95 < expected < 1.05 if donates else expected < 1.05
