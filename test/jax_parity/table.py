"""Runs both sides and compares them; `python test/jax_parity/table.py` writes the table of docs/jax.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cases import CASES, PAGE, Case
from run import observe_all
from sides import DEVICES

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parents[1] / "docs" / "jax.md"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", re.DOTALL)
#: The sides, and how many devices each has: None is torch_xla's own number, one.
SIDES = {"jax": DEVICES, "ours": None, "ours-spmd": DEVICES}


class Row(NamedTuple):
    case: Case
    jax: Mapping[str, Any] | None
    ours: Mapping[str, Any] | None


def rows() -> list[Row]:
    """Both sides' observations of each case; each side has a separate process."""
    from children import run_in_child

    observed = {name: run_in_child(observe_all, name, devices=devices).value for name, devices in SIDES.items()}
    jax, ours = observed["jax"], {**observed["ours"], **observed["ours-spmd"]}
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
    """A row for each behaviour that differs or has no counterpart, and the number of the others."""
    lines = ["| behaviour | JAX's test | JAX | here | why it differs |", "| --- | --- | --- | --- | --- |"]
    same = 0
    for case, jax, ours in found:
        if ours is not None and ours == jax:
            same += 1
            continue
        sources = "its page" if case.sources == (PAGE,) else ", ".join(f"`{source}`" for source in case.sources)
        here = "nothing to compare" if ours is None else _cell(ours)
        lines.append(f"| {case.behaviour} | {sources} | {_cell(jax) if jax else '-'} | {here} | {case.reason} |")
    others = f"In {same} other cases of `test/jax_parity/cases.py` both sides do the same."
    return "\n".join([*lines, "", others]) + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # children.py is there
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(TABLE.sub(lambda _: table(rows()), text), encoding="utf-8")
