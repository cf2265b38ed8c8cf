"""The messages of the package, read from its code: the tests of the documentation look each of them up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_GAP = "\0"
_RAISED = {
    *("TypeError", "ValueError", "RuntimeError", "ImportError", "DonationError", "NotImplementedError"),
    *("RecursionError", "FileNotFoundError", "FileExistsError", "AssertionError"),
}
# Functions that return messages, or sentences of them.
_WRITERS = {
    *("_errors.describe_use", "_errors.describe_reuse", "debug._text", "explain.explain"),
    *("explain._differs_per_device", "notices._unusable_text", "outcomes.why_unused"),
}


_TEXTS = (ast.Constant, ast.JoinedStr, ast.BinOp, ast.List, ast.IfExp)


@dataclass(frozen=True)
class Message:
    """A message, or a part that is written in one place.

    Attributes:
        where: its line in the code.
        text: its longest constant part, between texts that the program fills in.
        word: the word of `see(word)` in it; None if it names none.
    """

    where: str
    text: str
    word: str | None


def _text(node: ast.AST) -> str:
    """A text with gaps for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return _GAP


def _named(tree: ast.AST) -> dict[str, list[ast.AST]]:
    """What the names of a function or a module stand for, if that is a text or a list of texts."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, _TEXTS) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "append" and isinstance(called.value, ast.Name):
            found.setdefault(called.value.id, []).extend(node.args)  # type: ignore[attr-defined]
    return found


def _messages(node: ast.AST, named: dict[str, list[ast.AST]], where: str) -> Iterator[Message]:
    """The messages of an expression, and of the names in it."""
    pieces: list[str] = []
    words: list[str] = []
    todo, done = [node], set()
    while todo:
        part = todo.pop()
        if isinstance(part, ast.Name) and part.id not in done:
            done.add(part.id)
            todo += named.get(part.id, [])
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and part.func.id == "see":
            words.append(ast.literal_eval(part.args[0]))
            continue
        if (text := _text(part)) != _GAP:
            pieces.append(max(text.split(_GAP), key=len))
        if isinstance(part, ast.JoinedStr):
            todo += [value.value for value in part.values if isinstance(value, ast.FormattedValue)]
        elif not isinstance(part, ast.Constant):
            todo += ast.iter_child_nodes(part)
    for piece in pieces:
        if len(piece.split()) > 3 and not piece.startswith("unreachable"):
            yield Message(where, " ".join(piece.split()), words[0] if words else None)


def written() -> list[Message]:
    """The messages that the Python code writes out."""
    found = []
    for path in sorted((ROOT / "torch_xla_donate").rglob("*.py")):
        if path.name == "_numbers.py":
            continue  # its error is torch's own
        tree = ast.parse(path.read_text(encoding="utf-8"))
        module = _named(ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], []))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            named = module | _named(function)
            for node in ast.walk(function):
                name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
                is_raised = name in _RAISED or name in ("warn", "warn_explicit")
                if is_raised and node.args:  # type: ignore[attr-defined]
                    text = node.args[0]  # type: ignore[attr-defined]
                elif isinstance(node, ast.Return) and node.value and f"{path.stem}.{function.name}" in _WRITERS:
                    text = node.value
                else:
                    continue
                found += _messages(text, named, f"{path.name}:{node.lineno}")
    return list(dict.fromkeys(found))
