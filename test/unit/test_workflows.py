"""The workflows of CI run commands that exist, on each release of torch_xla that `make` knows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_each_target_of_a_workflow_is_one_of_make() -> None:
    targets = {name for text in WORKFLOWS.values() for name in re.findall(r"run: make ([a-z-]+)", text)}
    targets |= set(re.search(r"target: \[(.+)\]", WORKFLOWS["nightly"])[1].split(", "))  # type: ignore[index]
    assert targets >= {"lint", "test", "wheel", "docs", "test-nightly", "test-upstream", "soak", "fuzz"}
    assert {name for name in targets if not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE)} == set()


def test_the_workflows_test_each_release() -> None:
    releases = re.search(r"^RELEASES\s*:= (.+)$", MAKEFILE, re.MULTILINE)[1].split()  # type: ignore[index]
    matrices = [row.split(", ") for text in WORKFLOWS.values() for row in re.findall(r"torch-xla: \[(.+)\]", text)]
    assert len(matrices) == 2 and all(row == releases for row in matrices)
    used = {version for text in WORKFLOWS.values() for version in re.findall(r"torch-xla: (\d\S*)", text)}
    assert used and used <= set(releases)
