"""Finds lines of code by the names of tensors, and edits that cannot change a program's values.

An edit is proposed as text only if the source shows that it is safe. Otherwise the hint has the fact, or an edit in
words. `auto_donate` is always safe.
"""

from __future__ import annotations

import ast
import difflib
import io
import os
from collections.abc import Iterable
from pathlib import Path

from torch_xla_donate._errors import see
from torch_xla_donate._tools import safety
from torch_xla_donate._tools.hints import Change, Hint
from torch_xla_donate._tools.names import Name, is_installed
from torch_xla_donate._tools.source import Source, Suite, caller_of, digest_of, encoding_of, is_step_end, read

# ---- Lines ----


def find_write(name: Name) -> tuple[str, bool]:
    """``file:line`` of the code that writes a tensor in place, and whether it writes a part, such as ``cache[i] = k``.

    The line of the variable if no such write is found.
    """
    attribute = name.path.rpartition(".")[2] if "." in name.path else ""
    for file in dict.fromkeys((name.file, name.owner_file)):
        source = read(file)
        for node in ast.walk(source.tree) if source is not None else ():
            written, is_part = _written(node)
            # Another file may call the object by another name: `self.cache` for `model.cache`.
            is_tensor = written is not None and (
                ast.unparse(written) == str(name)
                if not attribute.isidentifier()
                else isinstance(written, ast.Attribute) and written.attr == attribute
            )
            if is_tensor:
                return f"{file}:{node.lineno}", is_part  # type: ignore[attr-defined]
    return f"{name.file}:{name.assigned()}", False


def _written(node: ast.AST) -> tuple[ast.expr | None, bool]:
    """The tensor that a node writes, and whether it writes a part of it."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return node.value, True
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == "data":
        return node.value, False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        part = node.func.value  # cache[i].copy_(k), cache.narrow(0, i, 1).copy_(k)
        if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
            return part.func.value, True
        if isinstance(part, ast.Subscript):
            return part.value, True
    return None, False


def find_assignment(name: Name) -> str:
    """``file:line`` of the last assignment to the variable, or to a part of it, before the line that its frame runs."""
    best = name.assigned()
    source = read(name.file)
    if source is not None:
        scope = source.scope_at(name.line, name.code.co_name) if name.code is not None else source.tree
        lines = source.outer_stores(scope, name.variable)
        if lines and not name.path:
            return f"{name.file}:{lines[-1]}"
        for node in ast.walk(scope):
            if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
                root: ast.expr = node
                while isinstance(root, ast.Subscript | ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and root.id == name.variable and best < node.lineno <= name.line:
                    best = node.lineno
    return f"{name.file}:{best}"


# ---- Edits ----


AUTO_DONATE = "call torch_xla_donate.auto_donate() before the loop"


def call_auto_donate(file: str, line: int) -> list[Change]:
    """Switches `auto_donate` on after the last import of the main module before the line that runs the first step.

    Once for all hints, as it is one switch of the process. None if there is no such import, or if the file is a tool's.
    """
    source = read(file) if not is_installed(file) else None
    last = _last_import(source, line) if source is not None else None
    if source is None or last is None:
        return []
    end = source.newline()
    after = (last.end_lineno or 0) + 1
    imports = _import_change(source, after) or []
    return [*imports, _insert(source, after, f"{end}torch_xla_donate.auto_donate(){end}")]


def donate_before(name: Name, where: str, site: str) -> list[Change]:
    """A mark before ``x = f(x)``; none unless the source shows that nothing else can hold the old value."""
    source = read(name.file)
    if source is None or name.code is None or name.path or not site.startswith(f"{name.file}:"):
        return []
    update, sync = (source.statement_at(int(place.rpartition(":")[2])) for place in (where, site))
    if not isinstance(update, ast.Assign) or sync is None or not is_step_end(sync):
        return []
    suite = source.suite_of(sync)
    if suite is None or update not in suite or suite.index(update) > suite.index(sync):
        return []
    scope = source.scope_of(update)
    variable = name.variable
    loop = source.parents[sync]
    loads, stores = source.loads(scope, variable), source.stores(scope, variable)
    before = [store for store in stores if not source.inside(store, loop)]
    if (
        loads is None
        or not before
        or not all(safety.is_plain_target(source, store) for store in stores)
        or [store for store in stores if source.inside(store, loop)] != update.targets
        or source.parents[loop] is not scope
        or getattr(scope, "decorator_list", [])  # a compiler may run the function in its own way
        or any(isinstance(node, ast.Continue) for node in ast.walk(loop))  # the next round would mark a pending tensor
        or not safety.makes_array(update.value)
        or not all(safety.is_uploaded(source, scope, store) for store in before)
        or not any(source.inside(load, update) for load in loads)
        or safety.is_doubtful(source)
    ):
        return []
    rounds = [load for load in loads if source.inside(load, loop)]
    if not all(safety.only_computes(source, scope, load) for load in rounds):
        return []
    if any(load.lineno <= suite[-1].lineno for load in loads if load not in rounds):
        return []
    imports = _import_change(source, update.lineno)
    mark = _insert_before(source, update, f"torch_xla_donate.donate_buffer({source.text_of(update.targets[0])})")
    return [*imports, mark] if imports is not None else []


def detach_before(name: str, site: str) -> list[Change]:
    """``loss = loss.detach()`` before the end of the step; none if later code may need the graph."""
    step = _step_of(site)
    if step is None or not is_step_end(step[1]):
        return []
    source, sync, suite = step
    before = suite[: suite.index(sync)]
    scope = source.scope_of(sync)
    loads, stores = source.loads(scope, name), source.stores(scope, name)
    assigned = [s for s in before if isinstance(s, ast.Assign) and any(s.targets == [store] for store in stores)]
    if loads is None or not assigned:
        return []
    used = before[before.index(assigned[-1]) + 1 :]  # runs between the assignment and the edit

    def in_step(node: ast.AST) -> bool:
        return any(source.inside(node, statement) for statement in used)

    for store in stores:
        if not (
            isinstance(source.parents[store], ast.AugAssign)
            if in_step(store)
            else safety.is_plain_target(source, store)
        ):
            return []
    graphs = {load: source.statement_of(load) for load in loads if in_step(load) and safety.is_backward(source, load)}
    # A value that each round gives to autograd is a tensor.
    if not any(s in used and isinstance(getattr(s, "value", None), ast.Call) for s in graphs.values()):
        return []
    for load in loads:
        is_shown = in_step(load) and safety.is_shown(source, load)
        if load not in graphs and not is_shown and not safety.is_value(source, load):
            return []
    variable = source.text_of(assigned[-1].targets[0])
    return [_insert_before(source, sync, f"{variable} = {variable}.detach()")]


def optimizer_of(roots: Iterable[str], site: str) -> str:
    """The variable of the optimizer of some parameters; empty if the source does not show it.

    Args:
        roots: the variables that lead to the parameters.
        site: ``file:line`` of the sync, in whose loop the optimizer makes its step.
    """
    step = _step_of(site)
    if step is None:
        return ""
    source, sync, suite = step
    found = [caller for statement in suite if (caller := caller_of(statement, "step"))]
    if len(found) > 1:
        found = [caller for caller in found if _names_in_stores(source, sync, caller) & set(roots)]
    return found[0] if len(found) == 1 else ""


def _step_of(site: str) -> tuple[Source, ast.stmt, Suite] | None:
    """The source of a step, the statement that ends it, and the body of the loop around it; None without a loop."""
    file, _, line = site.rpartition(":")
    source = read(file)
    sync = source.statement_at(int(line)) if source is not None else None
    suite = source.suite_of(sync) if source is not None and sync is not None else None
    return None if source is None or sync is None or suite is None else (source, sync, suite)


def _names_in_stores(source: Source, statement: ast.stmt, variable: str) -> set[str]:
    """The names in the assignments of a variable."""
    assigned = [source.parents[store] for store in source.stores(source.scope_of(statement), variable)]
    return {node.id for one in assigned for node in ast.walk(one) if isinstance(node, ast.Name)}


def _last_import(source: Source, line: int) -> ast.stmt | None:
    """The last import of the module before a line after which torch_xla can be imported; None without one.

    The program may set variables of the environment first, which torch_xla reads when it is imported. So either it is
    imported by then, or only definitions follow until the line.
    """
    before = [node for node in source.tree.body if (node.end_lineno or node.lineno) < line]
    found = None
    is_imported = False
    for node in before:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            is_imported = is_imported or any(name.partition(".")[0] in _LOAD_TORCH_XLA for name in names)
            found = node if source.ends_line(node) else found
        elif not is_imported and not isinstance(node, ast.FunctionDef | ast.ClassDef) and not _is_text(node):
            found = None
    return found


_LOAD_TORCH_XLA = ("torch_xla", "torch_xla_donate")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _import_change(source: Source, line: int) -> list[Change] | None:
    """``import torch_xla_donate`` before a line, if the module does not have it; None if there is no place for it."""
    for node in source.tree.body:
        names = node.names if isinstance(node, ast.Import) and node.lineno < line else []
        if any(name.name == "torch_xla_donate" and name.asname is None for name in names):
            return []
    last = _last_import(source, line)
    if last is None:
        return None
    return [_insert(source, (last.end_lineno or 0) + 1, f"import torch_xla_donate{source.newline()}")]


def _insert(source: Source, line: int, text: str) -> Change:
    return Change(source.file, line, 0, text, source.digest)


def _insert_before(source: Source, statement: ast.stmt, code: str) -> Change:
    return _insert(source, statement.lineno, f"{source.indentation(statement)}{code}{source.newline()}")


# ---- The diff ----


def diff(hints: Iterable[Hint], folder: str) -> tuple[bytes, list[str]]:
    """The hints' changes as a unified diff for ``patch -p0`` in a folder, and a message for what is left out.

    The diff has the bytes of the files, as each file has its encoding. ``patch`` changes no file outside the folder
    that it runs in, and none through a link.
    """
    changes: dict[str, dict[Change, None]] = {}  # in their order, each once
    hints = list(hints)
    for hint in hints:
        for change in hint.changes:
            changes.setdefault(os.path.realpath(change.file), {})[change] = None
    text, left_out = b"", []
    if any(hint.edit.startswith(AUTO_DONATE) and not hint.changes for hint in hints):
        left_out.append(
            "The diff does not call auto_donate(): the main script shows no line of imports that the call could safely "
            f"follow. Call torch_xla_donate.auto_donate() before the loop. {see('verify')}"
        )
    for file, found in changes.items():
        name = os.path.relpath(file, os.path.realpath(folder))
        try:
            before = Path(file).read_bytes()
        except OSError:
            before = b""  # no change belongs to an empty file
        if name.startswith(os.pardir + os.sep) or not name.isprintable():
            reason = f"patch cannot change it from {folder}. Run verify in a folder above it"
        elif any(change.digest != digest_of(before) for change in found):
            reason = "it cannot be read, or has changed since the program ran. Run verify again"
        else:
            text += _file_diff(before, name, list(found))
            continue
        left_out.append(f"The diff leaves {file} out: {reason}. {see('verify')}")
    return text, left_out


def _file_diff(before: bytes, name: str, changes: list[Change]) -> bytes:
    encoding = encoding_of(before).removesuffix("-sig")  # a mark of the byte order stands only at the beginning
    lines = before.splitlines(keepends=True)  # of bytes: at the line ends of Python's parser
    for _, change in sorted(enumerate(changes), key=lambda item: (item[1].line, item[0]), reverse=True):
        lines[change.line - 1 : change.line - 1 + change.count] = [change.text.encode(encoding)]
    # `patch` reads a name with spaces up to a tab, and its lines end only at a line feed.
    label = os.fsencode(f"{name}\t")
    old, new = (io.BytesIO(text).readlines() for text in (before, b"".join(lines)))
    return b"".join(_ended(line) for line in difflib.diff_bytes(difflib.unified_diff, old, new, label, label))


def _ended(line: bytes) -> bytes:
    return line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n"
