"""The pages of the API: the public names of each public module, which mkdocstrings documents from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

from links import ROOT, read

_PACKAGE = ROOT / "torch_xla_donate"


def modules() -> dict[str, list[str]]:
    """The public names of the public modules, without the modules among them."""
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        inner = path.relative_to(_PACKAGE).with_suffix("").parts
        if not any(part.startswith("_") and part != "__init__" for part in inner):
            parts = [part for part in inner if part != "__init__"]
            names = _public(ast.parse(read(path)))
            if names:
                found[".".join(["torch_xla_donate", *parts])] = names
    public = {module.rpartition(".")[2] for module in found}
    return {module: [name for name in names if name not in public] for module, names in found.items()}


def _public(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def page(module: str) -> str:
    """The path of a module's page in the site."""
    return f"api/{module}.md"


def markdown(module: str) -> str:
    """The page of a module."""
    docstring = ast.get_docstring(ast.parse(read(_file(module)))) or ""
    head = f"# {module}\n\n{docstring}\n"
    return head + "".join(f"\n::: {module}.{name}\n" for name in modules()[module])


def _file(module: str) -> Path:
    folder = ROOT.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
