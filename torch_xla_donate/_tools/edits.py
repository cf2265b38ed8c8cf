"""Finds lines of code by the names of tensors, and edits that cannot change a program's values.

An edit is proposed as text only if the source shows that it is safe. Otherwise the hint has the fact, or an edit in
words. `auto_donate` is always safe.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable

from torch_xla_donate._tools.hints import Change, Hint
from torch_xla_donate._tools.names import Name
from torch_xla_donate._tools.source import Source, caller_of, is_step_end, names_in, read, read_text

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


def call_auto_donate(file: str, site: str) -> list[Change]:
    """Switches `auto_donate` on after the last import of a file that precedes the step; none without an import."""
    source = read(file)
    place, _, line = site.rpartition(":")
    last = _last_import(source, int(line) if place == file else len(source.lines)) if source is not None else None
    if source is None or last is None:
        return []
    end = source.newline()
    after = (last.end_lineno or 0) + 1
    imports = _import_change(source, after) or []
    return [*imports, Change(file, after, 0, f"{end}torch_xla_donate.auto_donate(){end}")]


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
    arguments = {arg.arg for arg in ast.walk(scope) if isinstance(arg, ast.arg)}
    if (
        loads is None
        or variable in arguments
        or not all(_is_plain_target(source, store) for store in stores)
        or [store for store in stores if source.inside(store, loop)] != update.targets
        or source.parents[loop] is not scope
        or any(isinstance(node, ast.Continue) for node in ast.walk(loop))  # the next round would mark a pending tensor
        or not _makes_array(update.value)
        or not all(_is_uploaded(source, store) for store in stores if not source.inside(store, loop))
        or not any(source.inside(load, update) for load in loads)
    ):
        return []
    # The steps have shown that nothing which every round makes holds the old value. A graph of autograd that was made
    # before the loop, or in some rounds only, could.
    rounds = [load for load in loads if source.inside(load, loop)]
    if not all(_is_operand(source, load) and _statement(source, load) in suite for load in rounds):
        return []
    if any(load.lineno <= suite[-1].lineno for load in loads if load not in rounds):
        return []
    imports = _import_change(source, update.lineno)
    mark = _insert_before(source, update, f"torch_xla_donate.donate_buffer({variable})")
    return [*imports, mark] if imports is not None else []


def detach_before(name: str, site: str) -> list[Change]:
    """``loss = loss.detach()`` before the end of the step; none if later code may need the graph."""
    file, _, line = site.rpartition(":")
    source = read(file)
    sync = source.statement_at(int(line)) if source is not None else None
    suite = source.suite_of(sync) if source is not None and sync is not None and is_step_end(sync) else None
    if source is None or sync is None or suite is None:
        return []
    before = suite[: suite.index(sync)]
    stores = source.stores(source.scope_of(sync), name)
    loads = source.loads(source.scope_of(sync), name)
    assigned = [s for s in before if isinstance(s, ast.Assign) and any(store in s.targets for store in stores)]
    if loads is None or not assigned:
        return []
    used = before[before.index(assigned[-1]) + 1 :]
    for load in loads:
        in_step = any(source.inside(load, statement) for statement in used)
        if not (in_step and _is_backward(source, load)) and not _is_value(source, load):
            return []
    return [_insert_before(source, sync, f"{name} = {name}.detach()")]


def clear_gradients(roots: Iterable[str], site: str) -> tuple[str, list[Change]]:
    """The optimizer's name, and ``zero_grad`` after its step; no change if code could read the gradients later.

    Args:
        roots: the variables that lead to the gradients.
    """
    file, _, line = site.rpartition(":")
    source = read(file)
    sync = source.statement_at(int(line)) if source is not None else None
    if source is None or sync is None:
        return "", []
    body = next((b for _, b in ast.iter_fields(source.parents[sync]) if isinstance(b, list) and sync in b), [])
    clears = {caller: statement for statement in body if (caller := caller_of(statement, "zero_grad"))}
    update = next((s for s in body[: body.index(sync)] if caller_of(s, "step") in clears), None)
    if update is None:
        return "", []
    optimizer = caller_of(update, "step")
    call = clears[optimizer].value
    first, last = body.index(clears[optimizer]), body.index(update)
    between = body[last + 1 :] + body[:first]
    following = body[last + 1]
    if (
        source.suite_of(sync) is not body
        or first > last
        or call.args  # set_to_none=False: the optimizer also updates parameters whose gradient is zero
        or call.keywords
        or any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(source.tree))
        or {optimizer, *roots} & set(names_in(between))
        or not source.is_separate(following)
    ):
        return optimizer, []
    return optimizer, [_insert_before(source, following, f"{optimizer}.zero_grad(set_to_none=True)")]


def _last_import(source: Source, line: int) -> ast.stmt | None:
    """The last import of the module before a line; None if other code shares its line."""
    imports = [n for n in source.tree.body if isinstance(n, ast.Import | ast.ImportFrom) and n.lineno < line]
    return imports[-1] if imports and source.is_separate(imports[-1]) else None


def _import_change(source: Source, line: int) -> list[Change] | None:
    """``import torch_xla_donate`` before a line, if the module does not have it; None if there is no place for it."""
    for node in source.tree.body:
        names = node.names if isinstance(node, ast.Import) and node.lineno < line else []
        if any(name.name == "torch_xla_donate" and name.asname is None for name in names):
            return []
    last = _last_import(source, line)
    if last is None:
        return None
    return [Change(source.file, (last.end_lineno or 0) + 1, 0, f"import torch_xla_donate{source.newline()}")]


def _statement(source: Source, node: ast.AST) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = source.parents[node]
    return node


def _insert_before(source: Source, statement: ast.stmt, code: str) -> Change:
    return Change(source.file, statement.lineno, 0, f"{source.indentation(statement)}{code}{source.newline()}")


# ---- What is safe ----

# They return a new array and keep no argument.
_NEW = re.compile(
    "abs|add|addmm|amax|amin|bmm|cat|clamp|clone|cos|cumsum|div|einsum|erf|exp|gelu|log|matmul|maximum|mean|minimum|mm|"
    "mul|neg|norm|pow|relu|rsqrt|sigmoid|sign|silu|sin|softmax|sqrt|square|stack|sub|sum|tanh|tril|triu|where"
)
_FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
_VALUES = {"item", "tolist", "shape", "dtype", "device", "size", "dim", "detach"}  # of a tensor, without a graph


def _is_plain_target(source: Source, store: ast.Name) -> bool:
    parent = source.parents[store]
    return isinstance(parent, ast.Assign) and parent.targets == [store]


def _is_uploaded(source: Source, store: ast.Name) -> bool:
    """Whether the assigned value is a new array from the host, which has a buffer: ``torch.ones(4).to("xla")``."""
    statement = source.parents[store]
    value = statement.value if isinstance(statement, ast.Assign) else None
    if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "to"):
        return False
    made = value.func.value
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute):
        if isinstance(made.func.value, ast.Name):
            is_on_host = not any(keyword.arg in ("device", None) for keyword in made.keywords)
            return made.func.value.id == "torch" and made.func.attr in _FACTORIES and is_on_host
        if made.func.attr not in ("reshape", "view", "float", "bfloat16", "requires_grad_"):
            return False
        made = made.func.value
    return False


def _makes_array(value: ast.expr) -> bool:
    """Whether an expression computes a new array, so that no other name holds it."""
    if isinstance(value, ast.BinOp | ast.UnaryOp):
        return True
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    return _NEW.fullmatch(value.func.attr) is not None


def _is_operand(source: Source, load: ast.Name) -> bool:
    """Whether a read only computes with the value, so that it makes no other name for it."""
    parent = source.parents[load]
    if isinstance(parent, ast.BinOp | ast.UnaryOp | ast.Compare):
        return True
    if isinstance(parent, ast.Attribute):
        call = source.parents[parent]
        if isinstance(call, ast.Call) and call.func is parent:
            return parent.attr in _VALUES - {"detach"} or _NEW.fullmatch(parent.attr) is not None
        return parent.attr in ("shape", "dtype", "device")
    if isinstance(parent, ast.Call) and load in parent.args:
        function = parent.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            return function.value.id == "torch" and _NEW.fullmatch(function.attr) is not None
    return False


def _is_backward(source: Source, load: ast.Name) -> bool:
    """Whether a read computes gradients: ``loss.backward()`` or ``torch.autograd.grad(loss, ...)``."""
    parent = source.parents[load]
    call = source.parents[parent] if isinstance(parent, ast.Attribute) else parent
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and (call.func.attr == "backward" if call.func is parent else call.func.attr == "grad")
    )


def _is_value(source: Source, load: ast.Name) -> bool:
    """Whether a read needs only the value, not the graph."""
    parent = source.parents[load]
    if isinstance(parent, ast.Attribute):
        return parent.attr in _VALUES
    is_call = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name)
    return isinstance(parent, ast.FormattedValue) or (is_call and parent.func.id in ("print", "float", "str"))  # type: ignore[attr-defined]


# ---- The diff ----


def diff(hints: Iterable[Hint]) -> str:
    """The hints' changes as a unified diff; empty if no hint has one.

    Each file's changes are applied to its text of now. If the file is not as it was when the program was watched, the
    diff may not fit.
    """
    changes: dict[str, dict[Change, None]] = {}  # in their order, each once
    for hint in hints:
        for change in hint.changes:
            changes.setdefault(change.file, {})[change] = None
    text = ""
    for file, found in changes.items():
        before = read_text(file).splitlines(keepends=True)
        after = list(before)
        for _, change in sorted(enumerate(found), key=lambda item: (item[1].line, item[0]), reverse=True):
            lines = change.text.splitlines(keepends=True)
            start = change.line - 1
            after[start : start + change.count] = lines
        text += "".join(_ended(line) for line in difflib.unified_diff(before, after, file, file))
    return text


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
