"""Hooks of mkdocs: the pages of the API, and links that lead out of docs/."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_PACKAGE = Path(__file__).resolve().parents[2] / "torch_xla_donate"
_MODULES = {"torch_xla_donate": "__init__.py", "torch_xla_donate.hlo": "hlo/__init__.py"}
_MODULES["torch_xla_donate.testing"] = "testing.py"


def on_files(files: Files, *, config: Any) -> Files:
    """Adds a page for each public module, which mkdocstrings fills from the docstrings."""
    for module, path in _MODULES.items():
        tree = ast.parse((_PACKAGE / path).read_text(encoding="utf-8"))
        (names,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
        parts = [f"# {module}", ast.get_docstring(tree) or ""]
        parts += [f"::: {module}.{name}" for name in ast.literal_eval(names) if f"{module}.{name}" not in _MODULES]
        files.append(File.generated(config, f"api/{module}.md", content="\n\n".join(parts)))
    style = Path(__file__).with_name("site.css")
    files.append(File.generated(config, style.name, abs_src_path=str(style)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A link to a file of the repository that is not in docs/ becomes its text."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)\s]+\)", r"\1", markdown)
