"""The messages of the package, read from its code. The site and the tests of the documentation use them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from links import ROOT, read

#: Stands in a message for a text that the program fills in.
GAP = "…"
_ERRORS = {
    *("TypeError", "ValueError", "RuntimeError", "ImportError", "DonationError"),
    *("FileNotFoundError", "FileExistsError"),
}
# Functions that return messages, or sentences of them, by module and name.
_WRITERS = {
    "_errors.describe_use": "DonatedBufferError",
    "_errors.describe_reuse": "DonationWarning",
    "copies._text": "DonationWarning",
    "debug._text": "FloatingPointError",
    "explain.explain": "reason",
    "explain._differs_per_device": "reason",
    "notices._unusable_text": "DonationWarning",
    "outcomes.why_unused": "reason",
    "signatures._text": "DonationWarning",
}


@dataclass(frozen=True)
class Message:
    """A message of the package.

    Attributes:
        where: its line in the code, or the code of a reason.
        file: path of its file in the repository.
        kind: the exception or warning; ``reason`` for a sentence of the report and of `Some donated buffers ...`.
        text: its text, with `GAP` for what is filled in. Of several choices it has the longest.
        pieces: the constant parts that are written in one place, between gaps, choices and names.
        page: the page of docs/ that it names; None if it names none.
    """

    where: str
    file: str
    kind: str
    text: str
    pieces: tuple[str, ...]
    page: str | None

    @property
    def longest(self) -> str:
        """The longest constant part."""
        return max(self.pieces, key=len)


class _Scope:
    """The texts that the names of a module, or of a function in it, stand for."""

    def __init__(self, tree: ast.AST, outer: _Scope | None = None) -> None:
        self._outer = outer
        self._values: dict[str, list[ast.expr]] = {}
        for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._values.setdefault(node.targets[0].id, []).append(node.value)
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "append" and isinstance(called.value, ast.Name):
                self._values.setdefault(called.value.id, []).extend(node.args)  # type: ignore[union-attr]

    def text(self, node: ast.AST, choices: bool) -> str:
        """The text of an expression.

        choices: whether to choose the longest of alternatives and to follow names, or to make both a gap.
        """
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(value, choices) for value in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value, choices)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, choices) + self.text(node.right, choices)
        if isinstance(node, ast.IfExp) and choices:
            return max(self.text(node.body, choices), self.text(node.orelse, choices), key=len)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "see":
            return _see(ast.literal_eval(node.args[0]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            return self._lines(node.args[0], choices)
        if isinstance(node, ast.Name) and choices:
            return self._named(node)
        return GAP

    def _named(self, node: ast.Name) -> str:
        """The text that a name stands for, if it is assigned once, and not by means of itself."""
        values = self._values.get(node.id, [])
        if not values and self._outer is not None:
            return self._outer._named(node)
        if len(values) != 1 or any(isinstance(n, ast.Name) and n.id == node.id for n in ast.walk(values[0])):
            return GAP
        return self.text(values[0], choices=True)

    def _lines(self, node: ast.expr, choices: bool) -> str:
        """A list that is written out and then extended by `append`, as lines, without those for single tensors."""
        values = self._values.get(node.id, []) if isinstance(node, ast.Name) else []
        if not values or not isinstance(values[0], ast.List):
            return GAP
        lines = [self.text(value, choices) for value in (*values[0].elts, *values[1:])]
        return ("\n" if choices else GAP).join(line for line in lines if not re.match(rf"  (?:{GAP}|\.\.\.)", line))


def _see(page: str) -> str:
    return f"See `python -m torch_xla_donate explain {page}`."


def without_see(text: str) -> str:
    """A message without the sentence that names its page."""
    return re.sub(r"\s*See `python -m torch_xla_donate explain \w+`\.", "", text)


def _message(where: str, file: str, kind: str, scope: _Scope, node: ast.expr) -> Message | None:
    """The message of an expression; None if it has no three words in a row."""
    text = re.sub(rf"{GAP}(?:{GAP})+", GAP, scope.text(node, choices=True))
    pieces = tuple(without_see(scope.text(node, choices=False)).split(GAP))
    if max(len(piece.split()) for piece in pieces) < 3:
        return None
    page = re.search(r"explain (\w+)`", text)
    return Message(where, file, kind, text, pieces, page[1] if page else None)


def _kind(call: ast.Call) -> str | None:
    if isinstance(call.func, ast.Name) and call.func.id in _ERRORS:
        return call.func.id
    is_warning = isinstance(call.func, ast.Attribute) and call.func.attr in ("warn", "warn_explicit")
    return "DonationWarning" if is_warning else None


def _written() -> Iterator[Message | None]:
    for path in sorted((ROOT / "torch_xla_donate").rglob("*.py")):
        if path.name == "_numbers.py":
            continue  # its error is torch's own
        file, tree = path.relative_to(ROOT).as_posix(), ast.parse(read(path))
        module = _Scope(ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], []))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            scope, writer = _Scope(function, module), f"{path.stem}.{function.name}"
            inner = {id(node) for other in functions if other in function.body for node in ast.walk(other)}
            for node in ast.walk(function):
                if id(node) in inner:
                    continue
                if isinstance(node, ast.Call) and node.args and (kind := _kind(node)):
                    yield _message(f"{path.name}:{node.lineno}", file, kind, scope, node.args[0])
                if isinstance(node, ast.Return) and node.value is not None and writer in _WRITERS:
                    value = node.value  # the text is last in a tuple or a call, such as `Explanation(code, text)`
                    if isinstance(value, ast.Tuple) and value.elts:
                        value = value.elts[-1]
                    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.args:
                        value = value.args[-1]
                    yield _message(f"{path.name}:{node.lineno}", file, _WRITERS[writer], scope, value)


def written() -> list[Message]:
    """The messages that the Python code writes out."""
    return [message for message in _written() if message is not None]


def reasons() -> list[Message]:
    """The sentences for the codes of the hooks, except those that are all filled in."""
    from torch_xla_donate._report.reasons import SENTENCES

    file = "torch_xla_donate/_report/reasons.py"
    return [
        Message(code, file, "reason", text.replace("{details}", GAP), tuple(filter(None, pieces)), None)
        for code, text in SENTENCES.items()
        if any(pieces := re.split(r"\{details\}|(?<=: )", text))
    ]


def messages() -> list[Message]:
    """All messages."""
    return [*written(), *reasons()]
