"""The table of what was run on each release. `make support` writes both.

pytest calls `record()` at the end of a run with `--record FILE`. `python test/support.py` writes only the table.
"""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TEST = Path(__file__).resolve().parent
PAGE = TEST.parent / "docs" / "safety.md"
RESULTS = TEST / "results"
BLOCK = re.compile(r"(?<=<!-- support -->\n).*?(?=<!-- end of support -->)", re.DOTALL)
# The key of the result: what pytest's terminal reporter calls it.
OUTCOMES = {
    "passed": ("passed",),
    "failed": ("failed", "error", "xpassed"),
    "lacking": ("xfailed",),
    "skipped": ("skipped",),
}
TIERS = ("unit", "step", "process")


def record(stats: Mapping[str, Iterable[Any]], path: Path) -> None:
    """Writes how many tests of each tier ended how, and with which versions."""
    tiers: dict[str, collections.Counter[str]] = {tier: collections.Counter() for tier in TIERS}
    for outcome, keys in OUTCOMES.items():
        for report in (report for key in keys for report in stats.get(key, ())):
            tier = Path(report.nodeid.partition("::")[0]).parent.name
            tiers.setdefault(tier, collections.Counter())[outcome] += 1
    git = ["git", "-C", str(TEST), "describe", "--always", "--abbrev=12", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    found = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "commit": commit,
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {
            **{package: importlib.metadata.version(package) for package in ("torch", "torch_xla")},
            "python": platform.python_version(),
        },
        "tiers": {tier: {outcome: counts[outcome] for outcome in OUTCOMES} for tier, counts in tiers.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def table(folder: Path = RESULTS) -> str:
    """A row for each result file. A skip stands with what the release lacks: neither was tested there."""
    lines = [
        f"| torch_xla | torch | Python | {' | '.join(f'`{tier}`' for tier in TIERS)} | failed | date | commit |",
        "| --- | --- | --- |" + " ---: |" * (len(TIERS) + 1) + " --- | --- |",
    ]
    for path in sorted(folder.glob("*.json"), reverse=True):
        found = json.loads(path.read_text(encoding="utf-8"))
        tiers, versions = found["tiers"], found["versions"]
        cells = [versions["torch_xla"], versions["torch"], versions["python"]]
        for tier in TIERS:
            counts = tiers[tier]
            cells.append(f"{counts['passed']:,} of {sum(counts.values()):,}" if sum(counts.values()) else "not run")
        failed = sum(counts["failed"] for counts in tiers.values())
        lines.append(f"| {' | '.join([*cells, str(failed), found['date'], found['commit']])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    if len(BLOCK.findall(text)) != 1:
        sys.exit(f"{PAGE.name} has no block between <!-- support --> and <!-- end of support -->")
    PAGE.write_text(BLOCK.sub(lambda _: table(), text), encoding="utf-8")


if __name__ == "__main__":
    main()
