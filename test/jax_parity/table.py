"""Runs both sides and compares them; `python test/jax_parity/table.py` writes the table of docs/jax.md anew."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases import CASES, PAGE, Case
from sides import DEVICES

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parents[1] / "docs" / "jax.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
FORCED = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}
ENVIRONMENTS = {
    "jax": {"JAX_PLATFORMS": "cpu", **FORCED},
    "ours": {"PJRT_DEVICE": "CPU"},
    "ours-spmd": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(DEVICES), **FORCED},
}


class Row(NamedTuple):
    case: Case
    jax: Mapping[str, Any] | None
    ours: Mapping[str, Any] | None


def _observed(side: str) -> dict[int, Any]:
    """What the cases of a side have shown, by their number; each side has a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "2", **ENVIRONMENTS[side]}
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), side], env=environment, capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        raise RuntimeError(f"{side} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return {int(number): found for number, found in json.loads(done.stdout.splitlines()[-1]).items()}


def rows() -> list[Row]:
    """Both sides' observations of each case."""
    jax, ours = _observed("jax"), {**_observed("ours"), **_observed("ours-spmd")}
    return [Row(case, jax.get(number), ours.get(number)) for number, case in enumerate(CASES)]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return (" / " if any(isinstance(item, list) for item in value) else ", ").join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _cell(observations: Mapping[str, Any]) -> str:
    parts = [f"{name}: {_shown(value)}" for name, value in observations.items() if name != "warnings"]
    if times := observations.get("warnings"):
        parts.append("warns" if times == 1 else f"warns {times} times")
    return "; ".join(parts) or "does not warn"


def table(found: Sequence[Row]) -> str:
    lines = ["| behaviour | JAX's test | JAX | here | why it differs |", "| --- | --- | --- | --- | --- |"]
    for case, jax, ours in found:
        sources = "its page" if case.sources == (PAGE,) else ", ".join(f"`{source}`" for source in case.sources)
        here = "nothing to compare" if ours is None else "the same" if ours == jax else _cell(ours)
        lines.append(f"| {case.behaviour} | {sources} | {_cell(jax) if jax else '-'} | {here} | {case.reason} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(TABLE.sub(lambda _: table(rows()), text), encoding="utf-8")
