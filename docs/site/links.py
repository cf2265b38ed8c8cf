"""The files of the repository that are pages of the site, and the links between them."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Files outside docs/, and the index of docs/, which has to make room for the README.
_ELSEWHERE = {
    "README.md": "index.md",
    "docs/README.md": "contents.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "test/README.md": "tests.md",
    "test/line_coverage/uncovered.md": "uncovered.md",
    "third_party/README.md": "third_party.md",
    "third_party/host_facts.md": "host_facts.md",
}
_CODE = re.compile(r"(^ *```.*?^ *```$|(?<!`)(`+)(?!`).+?(?<!`)\2(?!`))", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")


def examples() -> list[Path]:
    """The programs in examples/, as docs/examples.md lists them."""
    return [
        ROOT / file
        for file in re.findall(r"^\| `(examples/\w+\.py)` \|", read(ROOT / "docs/examples.md"), re.MULTILINE)
    ]


@cache
def pages() -> dict[str, str]:
    """For each file that is a page, its path in the site; both relative, with slashes."""
    docs = {f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")}
    programs = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in examples()}
    return docs | _ELSEWHERE | programs


@cache
def pictures() -> list[str]:
    """The pictures of docs/."""
    return sorted(path.name for pattern in ("*.svg", "*.png") for path in (ROOT / "docs").glob(pattern))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchor(heading: str) -> str:
    """The anchor that GitHub, and the site, make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def relink(markdown: str, source: str, page: str) -> str:
    """Makes the links of a file of the repository those of the site. A link to a file that is not a page is text.

    Args:
        markdown: text of the file, or a part of it.
        source: path of the file, such as ``docs/spmd.md``.
        page: path of the page in the site where the text appears.
    """
    known = pages() | {f"docs/{name}": name for name in pictures()}

    def moved(link: re.Match[str]) -> str:
        target, _, fragment = link["target"].partition("#")
        if ":" in target:
            return link[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) if target else source
        if file not in known:
            return link["text"]
        place = posixpath.relpath(known[file], posixpath.dirname(page) or ".")
        return f"{link['image']}[{link['text']}]({place}{'#' if fragment else ''}{fragment})"

    # Links may have code as their text, so code is set aside and put back.
    code: list[str] = []

    def aside(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"\0{len(code) - 1}\0"

    text = _LINK.sub(moved, _CODE.sub(aside, markdown))
    return re.sub(r"\0(\d+)\0", lambda found: code[int(found[1])], text)
