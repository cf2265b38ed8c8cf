"""`make llama` at 1B: in each way the TPU compiler's answer is that of the formula."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs_jax

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@needs_jax
@pytest.mark.parametrize("way", ["functional", "in-place", "by-hand"])
def test_the_formula_is_right_for_1b_on_16_devices(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import _memory_model as model

    command = [sys.executable, str(EXAMPLES / "llama.py"), "--size", "1b", "--devices", "16", "--topology", "v6e:4x4"]
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "16"}
    child = subprocess.run(
        [*command, "--way", way, "--json"], env=env, capture_output=True, text=True, timeout=3600, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    row = json.loads(child.stdout.splitlines()[-1])
    size, donates = model.SIZES["1b"], way != "functional"
    assert row["memory"]["argument_bytes"] == model.arguments(size, 16)
    assert row["memory"]["output_bytes"] == model.outputs(size, 16, "v6e")
    assert row["memory"]["alias_bytes"] == (model.state(size, 16) if donates else 0)
    expected = model.total(size, 16, "v6e:4x4", donates) / model.measured(row)
    assert 0.95 < expected < 1.05 if donates else expected < 1.05
