"""A source file as a tree, with the statements and the uses of names that edits need."""

from __future__ import annotations

import ast
import functools
import os
import tokenize
from collections.abc import Iterator

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Suite = list[ast.stmt]
_Comprehension = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
_Inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | _Comprehension


class Source:
    """A file that could be read and parsed."""

    def __init__(self, file: str) -> None:
        text = read_text(file)
        self.file = file
        self.lines = text.splitlines(keepends=True)
        self.tree = ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def scope_of(self, node: ast.AST) -> Scope:
        """The function, or the module, that runs a statement."""
        while not isinstance(node, Scope):
            node = self.parents[node]
        return node

    def scope_at(self, line: int, name: str) -> Scope:
        """The innermost function of this name around a line; the module for ``<module>`` or if there is none."""
        found: Scope = self.tree
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and spans(node, line):
                found = node
        return found

    def statement_at(self, line: int) -> ast.stmt | None:
        """The simple statement that a line belongs to, if it is the only one of its lines."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign) and spans(node, line)
        ]
        return found[0] if len(found) == 1 and self.is_separate(found[0]) else None

    def is_separate(self, statement: ast.stmt) -> bool:
        """Whether no other code shares the statement's lines."""
        first = self.lines[statement.lineno - 1].encode()
        last = self.lines[(statement.end_lineno or statement.lineno) - 1].encode()
        rest = last[statement.end_col_offset or 0 :].strip()
        return not first[: statement.col_offset].strip() and (not rest or rest.startswith(b"#"))

    def indentation(self, statement: ast.stmt) -> str:
        return self.lines[statement.lineno - 1].encode()[: statement.col_offset].decode()

    def newline(self) -> str:
        return "\r\n" if self.lines and self.lines[0].endswith("\r\n") else "\n"

    def suite_of(self, statement: ast.stmt) -> Suite | None:
        """The statements of the loop's body that a statement stands in; None if it is not directly in a loop."""
        loop = self.parents[statement]
        return loop.body if isinstance(loop, ast.For | ast.While) and statement in loop.body else None

    def loads(self, scope: Scope, name: str) -> list[ast.Name] | None:
        """The reads of a variable of this scope. None if other code could reach the variable.

        Such code is a function inside that names it, ``global`` and ``nonlocal``, and functions like ``exec``.
        """
        found = []
        for node in ast.walk(scope):
            if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
                return None
            if isinstance(node, ast.Name):
                if node.id in ("exec", "eval", "locals", "globals", "vars"):
                    return None
                if node.id == name and isinstance(node.ctx, ast.Load | ast.Del):
                    if self._inner(node, scope):
                        return None
                    found.append(node)
        return found

    def stores(self, scope: Scope, name: str) -> list[ast.Name]:
        """The assignments of a variable in this scope."""
        return [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]

    def outer_stores(self, scope: Scope, name: str) -> list[int]:
        """The lines of functions inside a scope that assign its variable, by ``nonlocal`` or ``global``."""
        return [
            store.lineno
            for node in ast.walk(scope)
            if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names
            for store in self.stores(self.scope_of(node), name)
        ]

    def _inner(self, node: ast.AST, scope: Scope) -> bool:
        while (node := self.parents[node]) is not scope:
            if isinstance(node, _Inner):
                return True
        return False

    def inside(self, node: ast.AST, outer: ast.AST) -> bool:
        """Whether a node is another one, or a part of it."""
        found: ast.AST | None = node
        while found is not None and found is not outer:
            found = self.parents.get(found)
        return found is outer


def read_text(file: str) -> str:
    """The text of a Python file with its line ends, which an edit keeps."""
    with open(file, "rb") as stream:
        encoding, _ = tokenize.detect_encoding(stream.readline)
    with open(file, encoding=encoding, newline="") as text:
        return text.read()


def read(file: str) -> Source | None:
    """The file; None if it cannot be read or is not Python."""
    try:
        status = os.stat(file)
        return _parsed(file, status.st_mtime_ns, status.st_size)
    except (OSError, SyntaxError, ValueError):
        return None


@functools.lru_cache(maxsize=64)
def _parsed(file: str, changed: int, size: int) -> Source:
    return Source(file)


def spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def is_step_end(statement: ast.stmt) -> bool:
    """Whether a statement is ``torch_xla.sync()`` or ``xm.mark_step()``."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("sync", "mark_step")


def caller_of(statement: ast.stmt, method: str) -> str:
    """The variable ``x`` of a statement ``x.method(...)``; empty for another statement."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    function = call.func if isinstance(call, ast.Call) else None
    if isinstance(function, ast.Attribute) and function.attr == method and isinstance(function.value, ast.Name):
        return function.value.id
    return ""


def names_in(nodes: list[ast.stmt]) -> Iterator[str]:
    """The names that statements read."""
    for node in nodes:
        yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
