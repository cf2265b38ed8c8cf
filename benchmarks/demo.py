"""The examples that compare modes: what XLA aliases and plans, and of `make demo` the time and the peak memory."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _common
import click

EXAMPLES = _common.FOLDER.parent / "examples"
DEMO, PICTURE = "train_digits", _common.FOLDER.parent / "docs" / "demo.png"
# Only time and peak memory differ from run to run, and only the demo's are shown.
RUNS = {DEMO: 5, "train_transformer": 1, "ema_and_gan": 1, "kv_cache": 1}


def run(example: str, options: tuple[str, ...], picture: Path | None) -> list[dict[str, Any]]:
    """The example's own numbers of each mode, and its picture. It fails if the modes compute other values."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(EXAMPLES / f"{example}.py"), "--out", folder, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if picture is not None:
            shutil.copy(Path(folder) / f"{example}.png", picture)
        found: list[dict[str, Any]] = json.loads((Path(folder) / f"{example}.json").read_text(encoding="utf-8"))
        return found


def measure(example: str, runs: int, options: tuple[str, ...], picture: Path | None) -> list[dict[str, Any]]:
    """A row for each mode. Ratios are those within a run, to the first mode. The picture is that of the last run."""
    found = [run(example, options, picture) for _ in range(runs)]
    rows = []
    for index, numbers in enumerate(found[0]):
        row = {
            "example": example,
            "mode": numbers["mode"],
            "state_tensors": numbers.get("state_tensors") or numbers["cache_tensors"],
            "state_bytes": numbers.get("state_bytes") or numbers["cache_bytes"],
            "planned_bytes": numbers["planned_bytes"],
            "cpu": numbers["cpu"],
            "v6e": numbers["v6e"],
        }
        if example == DEMO:
            peaks = [one[index]["peak_bytes"] for one in found]
            seconds = [one[index]["step_seconds"] for one in found]
            row |= {
                "runs": runs,
                "peak_bytes": statistics.median(peaks),
                "step_ms": statistics.median(seconds) * 1e3,
                "over_plain": _common.ratio(seconds, [one[0]["step_seconds"] for one in found]),
                "kept_pointers": min(min(one[index]["kept_pointers"][2:]) for one in found),
            }
        rows.append(row)
    return rows


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    rows = result["rows"]
    demo = [row for row in rows if row["example"] == DEMO]

    def mib(count: float) -> str:
        return f"{count / _common.MIB:,.1f} MiB"

    def on_v6e(row: Mapping[str, Any], key: str) -> str:
        return "-" if row["v6e"] is None else str(row["v6e"][key])

    head = f"`make demo`, {mib(demo[0]['state_bytes'])} of training state"
    return {
        "training": _common.Table(
            "demo",
            (head, *(row["mode"] for row in demo)),
            [
                ("memory that XLA plans for a step", *(mib(row["planned_bytes"]) for row in demo)),
                ("peak memory above the start", *(mib(row["peak_bytes"]) for row in demo)),
                ("time of a step", *(f"{row['step_ms']:,.0f} ms" for row in demo)),
                ("time of a step, relative", *(f"{row['over_plain']['median']:.2f}" for row in demo)),
                (
                    "tensors of the state that keep their memory",
                    *(f"{row['kept_pointers']} of {row['state_tensors']}" for row in demo),
                ),
            ],
            f"Medians of {demo[0]['runs']} runs.",
        ),
        "steps": _common.Table(
            "demo: the step of each example, as XLA compiles it for CPU, and for a TPU v6e",
            ("step", "aliased", "bytes", "planned", "copies", "aliased on v6e", "copies on v6e", "written back on v6e"),
            [
                (
                    f"`{row['example']}.py`, {row['mode']}",
                    f"{row['cpu']['aliases']} of {row['state_tensors']}",
                    mib(row["cpu"]["aliased_bytes"]),
                    mib(row["planned_bytes"]),
                    str(row["cpu"]["copies"]),
                    *(on_v6e(row, key) for key in ("aliases", "copies", "written_back")),
                )
                for row in rows
            ],
        ),
    }


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """The demo, several times, and the other examples that compare modes."""
    rows = []
    for example, runs in ({DEMO: 2} if tiny else RUNS).items():
        picture = PICTURE if example == DEMO and results == _common.RESULTS else None
        rows += measure(example, runs, ("--steps", "3", "--hidden", "64") if tiny else (), picture)
    result = _common.describe("demo", {"tiny": tiny})
    result["rows"] = rows
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
