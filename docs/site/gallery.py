"""The gallery: the pictures of the documentation, and the programs in examples/ with their sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from links import ROOT, examples, pages, pictures, read, relink

_PICTURE = re.compile(r"!\[(?P<caption>[^\]]+)\]\((?:docs/)?(?P<name>[^)/]+)\)")


def captions() -> dict[str, tuple[str, str]]:
    """For each picture that a page shows, its caption and that page. Of several pages it has the first of docs/."""
    found: dict[str, tuple[str, str]] = {}
    for path in [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]:
        for picture in _PICTURE.finditer(read(path)):
            page = pages()[path.relative_to(ROOT).as_posix()]
            found.setdefault(picture["name"], (picture["caption"], page))
    return found


def _title(page: str) -> str:
    file = next(file for file, known in pages().items() if known == page)
    return read(ROOT / file).partition("\n")[0].removeprefix("# ")


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(read(path))) or ""


def gallery() -> str:
    """The page with all pictures and examples."""
    lines = ["# Gallery", "## Pictures"]
    for name in pictures():
        caption, page = captions()[name]
        lines.append(
            f"<figure markdown>\n![{caption}]({name}){{ loading=lazy }}\n"
            f"<figcaption markdown>{caption}. From [{_title(page)}]({page})</figcaption>\n</figure>"
        )
    lines += ["## Examples", "| program | shows |\n| --- | --- |"]
    for path in examples():
        first = _docstring(path).partition("\n")[0].replace("|", "\\|")
        lines[-1] += f"\n| [{path.name}](examples/{path.stem}.md) | {first} |"
    return "\n\n".join(lines) + "\n"


def source(path: Path) -> str:
    """The page of an example: what its docstring says, and its code."""
    file = f"examples/{path.name}"
    text = relink(_docstring(path), file, pages()[file])
    code = re.sub(r'\A""".*?"""\n+', "", read(path), flags=re.DOTALL)
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path.name}\n\n{text}\n\n```python\n{code}```\n"
