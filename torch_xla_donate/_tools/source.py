"""A source file as a tree, with the statements and the uses of names that edits need."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import os
import tokenize
import types

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Suite = list[ast.stmt]
_Comprehension = ast.GeneratorExp | ast.ListComp | ast.SetComp | ast.DictComp
_Inner = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | _Comprehension


class Source:
    """A file that could be read and parsed."""

    def __init__(self, file: str) -> None:
        with open(file, "rb") as stream:
            raw = stream.read()
        self.file = file
        self.digest = digest_of(raw)
        self.tree = ast.parse(raw)
        self.lines = list(io.StringIO(raw.decode(encoding_of(raw)), newline=""))  # the lines of the parser
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._code = compile(raw, file, "exec", dont_inherit=True)

    def compiles_to(self, code: types.CodeType) -> bool:
        """Whether the file still has the code of a function, or of the module, on the same lines."""
        found = [self._code]
        while found:
            one = found.pop()
            if one == code:
                return True
            found += [const for const in one.co_consts if isinstance(const, types.CodeType)]
        return False

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
        if statement.lineno > 1 and self.lines[statement.lineno - 2].rstrip().endswith("\\"):
            return False
        first = self.lines[statement.lineno - 1].encode()
        last = self.lines[(statement.end_lineno or statement.lineno) - 1].encode()
        rest = last[statement.end_col_offset or 0 :].strip()
        return not first[: statement.col_offset].strip() and (not rest or rest.startswith(b"#"))

    def ends_line(self, statement: ast.stmt) -> bool:
        """Whether a line can be put after the last line of a statement of the module."""
        end = statement.end_lineno or statement.lineno
        goes_on = any(node.lineno <= end < (node.end_lineno or end) for node in self.tree.body)
        return not goes_on and not self.lines[end - 1].rstrip().endswith("\\")

    def indentation(self, statement: ast.stmt) -> str:
        return self.lines[statement.lineno - 1].encode()[: statement.col_offset].decode()

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        """The first line of a node as the file writes it. The tree has other spellings of some letters."""
        line = self.lines[node.lineno - 1].encode()
        return line[node.col_offset : node.end_col_offset if node.end_lineno == node.lineno else None].decode()

    def newline(self) -> str:
        first = self.lines[0] if self.lines else ""
        return first[len(first.rstrip("\r\n")) :][:2] or "\n"

    def suite_of(self, statement: ast.stmt) -> Suite | None:
        """The statements of the loop's body that a statement stands in; None if it is not directly in a loop."""
        loop = self.parents[statement]
        return loop.body if isinstance(loop, ast.For | ast.While) and statement in loop.body else None

    def loads(self, scope: Scope, name: str) -> list[ast.Name] | None:
        """The reads of a variable of this scope. None if other code could reach the variable, or bind it unseen.

        Such code is a function inside that names it, ``global`` and ``nonlocal``, functions like ``exec``, and
        statements other than assignments, such as ``import`` and ``case``.
        """
        found = []
        for node in ast.walk(scope):
            if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
                return None
            if isinstance(node, ast.Attribute) and node.attr in _REFLECTION:
                return None
            if not isinstance(node, ast.Name):
                if node is not scope and bound_by(node) in (name, "*"):
                    return None
            elif node.id in _REFLECTION:
                return None
            elif node.id == name:
                if self._inner(node, scope):
                    return None
                if not isinstance(node.ctx, ast.Store):
                    found.append(node)
        return found

    def stores(self, scope: Scope, name: str) -> list[ast.Name]:
        """The assignments of a variable in this scope."""
        return [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]

    def is_imported(self, module: str) -> bool:
        """Whether only ``import module`` binds this name in the file."""
        found = [node for node in ast.walk(self.tree) if bound_by(node) in (module, "*")]
        return bool(found) and all(
            isinstance(node, ast.alias) and isinstance(self.parents[node], ast.Import) and not node.asname
            for node in found
        )

    def binds(self, name: str) -> bool:
        """Whether the file gives another meaning to the name of a function of Python."""
        return any(bound_by(node) in (name, "*") for node in ast.walk(self.tree))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that a node is a part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

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


_REFLECTION = {"exec", "eval", "locals", "globals", "vars", "f_globals", "__dict__"}


def bound_by(node: ast.AST) -> str:
    """The variable that a node binds or deletes: a name, an argument, an import, ``except ... as``, ``case``."""
    if isinstance(node, ast.Name):
        return "" if isinstance(node.ctx, ast.Load) else node.id
    if isinstance(node, ast.keyword):
        return ""
    names = (getattr(node, field, None) for field in ("asname", "name", "rest", "arg"))
    return next((str(name).partition(".")[0] for name in names if name), "")


def digest_of(raw: bytes) -> str:
    """Shows whether a file has changed."""
    return hashlib.sha256(raw).hexdigest()


def encoding_of(raw: bytes) -> str:
    """The encoding of a Python file."""
    return tokenize.detect_encoding(io.BytesIO(raw).readline)[0]


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
