"""mkdocs builds the site of `make docs` without a warning, and it loads nothing from elsewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocstrings needs Python 3.11")


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # mkdocstrings formats signatures with ruff, from PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(folder), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)


def test_the_site_has_all_pages_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(tmp_path, "-f", str(ROOT / "docs/site/mkdocs.yml"))
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert {f"{page.stem}.html" for page in (ROOT / "docs").glob("*.md") if page.stem != "README"} <= pages.keys()
    for name, text in pages.items():
        assert (
            re.findall(r"<(?:script|img|link rel=\"stylesheet\")[^>]* (?:src|href)=\"[^\"]*//[^\"]*\"", text) == []
        ), name
    entries = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any(e["location"] == "errors.html#refused-donations" and "has no buffer yet" in e["text"] for e in entries)
    assert any(e["location"] == "api/torch_xla_donate.html#torch_xla_donate.donate_buffer" for e in entries)
