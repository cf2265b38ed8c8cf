"""mkdocs builds the site without a warning; it loads nothing from elsewhere, and each page can be reached."""

from __future__ import annotations

import json
import os
import posixpath
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urldefrag

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocstrings needs Python 3.11")


class Page(HTMLParser):
    """The files that a page loads, its links, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors.add(found.get("id", ""))
        if "src" in found:
            self.loads.append(found["src"])
        if "href" in found:
            loads = tag == "link" and found.get("rel") not in ("canonical", "prev", "next")
            (self.loads if loads else self.links).append(found["href"])


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    # mkdocstrings formats signatures with ruff, from PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "-d", str(folder), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder, "-f", str(ROOT / "docs/site/mkdocs.yml"))
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    found = {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(found) > 150
    return found


def test_no_page_loads_anything_from_elsewhere(pages: dict[str, Page]) -> None:
    for name, page in pages.items():
        assert [url for url in page.loads if "//" in url] == [], name


def test_every_page_is_reached_from_the_first(pages: dict[str, Page]) -> None:
    reached, open_pages = {"index.html"}, ["index.html"]
    while open_pages:
        name = open_pages.pop()
        for link in pages[name].links:
            url, anchor = urldefrag(link)
            if ":" in url:
                continue
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), url)) if url else name
            assert target in pages, f"{name} links to {link}"
            assert anchor in pages[target].anchors or anchor.startswith("__"), f"{name} links to {link}"
            if target not in reached:
                reached.add(target)
                open_pages.append(target)
    assert reached == set(pages)


def test_the_search_finds_messages_and_functions(site: Path) -> None:
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    assert any(e["location"].startswith("messages/") and "not materialised" in e["text"] for e in entries)
    assert any(e["location"] == "api/torch_xla_donate.html#torch_xla_donate.donate_buffer" for e in entries)


def test_the_first_page_is_the_readme(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    assert "Three ways to donate" in text
    assert 'src="demo.png"' in text


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    """A copy of what the site is made from, with one wrong anchor."""
    for name in ("docs", "examples", "test", "third_party", "torch_xla_donate"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "cpp", "build"))
    for path in ROOT.iterdir():
        if path.suffix == ".md" or path.name == "LICENSE":
            shutil.copy(path, tmp_path)
    with (tmp_path / "docs" / "which.md").open("a", encoding="utf-8") as page:
        page.write("\nSee [the loops](auto.md#nowhere).\n")
    done = build(tmp_path / "out", "-f", str(tmp_path / "docs/site/mkdocs.yml"))
    assert done.returncode != 0
    assert "which.md" in done.stderr
    assert "#nowhere" in done.stderr
