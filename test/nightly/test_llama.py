"""`make llama` at 1B: in each way the TPU compiler's answer is that of the formula."""

from __future__ import annotations

import json

import pytest
from children import run_file
from helpers import ROOT, import_from, needs_jax


@needs_jax
@pytest.mark.parametrize("way", ["functional", "in-place", "by-hand"])
def test_the_formula_is_right_for_1b_on_16_devices(way: str) -> None:
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
