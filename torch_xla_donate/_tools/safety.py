"""Decides from the source whether an edit keeps a program's values. In doubt it does not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import torch

from torch_xla_donate._tools.names import Name
from torch_xla_donate._tools.source import Scope, Source, Suite, bound_by

# ---- Expressions ----

# They return a new array and keep no argument.
_NEW = {
    *("abs", "add", "addmm", "amax", "amin", "bmm", "cat", "clamp", "clone", "cos", "cumsum", "div", "erf", "exp"),
    *("gelu", "log", "matmul", "maximum", "mean", "minimum", "mm", "mul", "neg", "norm", "pow", "relu", "rsqrt"),
    *("sigmoid", "sign", "silu", "sin", "softmax", "sqrt", "square", "stack", "sub", "sum", "tanh", "tril", "triu"),
    "where",
}
_FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros"}
_ATTRIBUTES = {"shape", "dtype", "device"}
_READS = {"item", "tolist", "size", "dim"}
_BUILTINS = {"abs", "bool", "float", "int", "len", "max", "min", "round", "str"}
_OPERATORS = ast.BinOp | ast.UnaryOp | ast.Compare
_PARTS = _OPERATORS | ast.BoolOp | ast.IfExp | ast.JoinedStr | ast.FormattedValue | ast.Tuple | ast.List


def is_known(source: Source, scope: Scope, node: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
    """Whether an expression has only numbers, texts, and arrays without gradients, which this scope has made.

    It then runs no other code of the program, and autograd records nothing.
    """

    def known(*nodes: ast.AST) -> bool:
        return all(is_known(source, scope, one, seen) for one in nodes if isinstance(one, ast.expr))

    match node:
        case ast.Constant():
            return True
        case ast.Name():
            return node.id in seen or _is_known_variable(source, scope, node.id, seen | {node.id})
        case ast.Attribute():
            return node.attr in _ATTRIBUTES and known(node.value)
        case ast.Subscript():
            return known(node.value, node.slice)
        case ast.Call(func=ast.Name(id=name)):
            return name in _BUILTINS and not source.binds(name) and known(*node.args) and not node.keywords
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            if name in ("item", "tolist"):
                return _is_value_of_variable(owner)
            if name == "to":
                return known(owner)
            given = [keyword.value for keyword in node.keywords if keyword.arg not in ("device", "dtype")]
            is_safe = all(keyword.arg not in ("out", "inplace", None) for keyword in node.keywords)
            if isinstance(owner, ast.Name) and owner.id in ("torch", "math"):
                is_safe &= source.is_imported(owner.id) and (owner.id == "math" or name in _NEW | _FACTORIES)
            else:
                is_safe &= name in _NEW | _READS and known(owner)
            return is_safe and known(*node.args, *given)
    return isinstance(node, _PARTS) and known(*ast.iter_child_nodes(node))


def _is_known_variable(source: Source, scope: Scope, name: str, seen: frozenset[str]) -> bool:
    stores = source.stores(scope, name)
    if not stores or source.loads(scope, name) is None:
        return False
    for store in stores:
        parent = source.parents[store]
        if isinstance(parent, ast.For):
            found = _calls(parent.iter) == "range" and not source.binds("range")
        else:
            is_single = isinstance(parent, ast.AugAssign) or is_plain_target(source, store)
            found = is_single and is_known(source, scope, parent.value, seen)  # type: ignore[attr-defined]
        if not found:
            return False
    return True


def _is_value_of_variable(node: ast.expr) -> bool:
    """Whether an expression is a variable, or what methods of tensors compute from it: ``loss.detach().mean()``."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args and not node.keywords:
        if node.func.attr not in _NEW | {"detach", "cpu"}:
            return False
        node = node.func.value
    return isinstance(node, ast.Name)


def _calls(node: ast.AST | None) -> str:
    """The function of a call, as the source has it; empty for another node."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def is_plain_target(source: Source, store: ast.Name) -> bool:
    parent = source.parents[store]
    return isinstance(parent, ast.Assign) and parent.targets == [store]


# ---- Marks ----


def makes_array(value: ast.expr) -> bool:
    """Whether an expression computes a new array, so that no other name holds it."""
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return isinstance(value, ast.BinOp | ast.UnaryOp) or (is_call and value.func.attr in _NEW)  # type: ignore[attr-defined]


def only_computes(source: Source, scope: Scope, load: ast.Name) -> bool:
    """Whether a read only computes with the value, so that it makes no other name for it."""
    node: ast.AST = load
    while True:
        parent = source.parents[node]
        call = source.parents[parent]
        if isinstance(parent, _OPERATORS) or (isinstance(parent, ast.Call) and makes_array(parent)):
            node = parent
        elif isinstance(parent, ast.Attribute) and isinstance(call, ast.Call) and call.func is parent:
            if parent.attr not in _NEW | _READS:
                return False
            node = call
        elif isinstance(parent, ast.Attribute) and parent.attr in _ATTRIBUTES:
            node = parent
        elif isinstance(parent, ast.Tuple | ast.List) and isinstance(call, ast.Call) and makes_array(call):
            node = call
        else:
            return isinstance(node, ast.expr) and node is not load and is_known(source, scope, node)


# Autograd keeps operands of tensors that need gradients. An array that torch makes on the device has no buffer. A
# function can read a variable from its caller's frame.
_DOUBTFUL = {"requires_grad", "requires_grad_", "set_default_device", "f_locals"}


def is_doubtful(source: Source) -> bool:
    """Whether the file uses something by which other code could keep a variable's value, or have given it."""
    names = {getattr(node, "attr", getattr(node, "arg", getattr(node, "id", ""))) for node in ast.walk(source.tree)}
    imported = {node.name for node in ast.walk(source.tree) if isinstance(node, ast.alias)}
    return bool((names | imported) & _DOUBTFUL) or torch.get_default_device().type != "cpu"


def is_uploaded(source: Source, scope: Scope, store: ast.Name) -> bool:
    """Whether the assigned value is a new array from the host, which has a buffer: ``torch.ones(4).to("xla")``.

    A scalar has none, and neither has an array that torch makes on the device.
    """
    statement = source.statement_of(store)
    value = getattr(statement, "value", None)
    if source.parents[statement] is not scope:
        return False
    if not _calls(value).endswith(".to") or not value.args or not _is_xla(source, scope, value.args[0]):  # type: ignore[union-attr]
        return False
    made = value.func.value  # type: ignore[union-attr]
    while _calls(made).endswith((".reshape", ".view", ".float", ".bfloat16")):
        if made.args and not _has_dimensions(made):
            return False
        made = made.func.value
    folder, _, function = _calls(made).rpartition(".")
    is_on_host = folder == "torch" and source.is_imported("torch") and function in _FACTORIES
    return is_on_host and _has_dimensions(made) and not any(one.arg in ("device", None) for one in made.keywords)


def _has_dimensions(made: ast.Call) -> bool:
    """Whether the arguments of a call, such as a shape, cannot give a scalar."""
    if not made.args or any(isinstance(node, ast.Starred) for node in ast.walk(made)):
        return False
    first = made.args[0]
    if isinstance(first, ast.Tuple | ast.List):
        return bool(first.elts)
    is_size = _calls(made).rpartition(".")[2] not in ("tensor", "full", "randint")
    return is_size and (len(made.args) > 1 or isinstance(first, ast.Constant))


def _is_xla(source: Source, scope: Scope, device: ast.expr) -> bool:
    """Whether an expression is an XLA device, or a variable that only has one."""
    if isinstance(device, ast.Name) and source.loads(scope, device.id) is not None:
        stores = source.stores(scope, device.id)
        values = [source.parents[store].value for store in stores if is_plain_target(source, store)]  # type: ignore[attr-defined]
        return len(values) == len(stores) > 0 and not any(
            isinstance(value, ast.Name) or not _is_xla(source, scope, value) for value in values
        )
    if isinstance(device, ast.Constant):
        return str(device.value).startswith("xla")
    return _calls(device) in ("torch_xla.device", "xm.xla_device")


# ---- Graphs ----


def is_backward(source: Source, load: ast.Name) -> bool:
    """Whether a read computes gradients: ``loss.backward()`` or ``torch.autograd.grad(loss, ...)``."""
    parent = source.parents[load]
    call = source.parents[parent] if isinstance(parent, ast.Attribute) else parent
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and (call.func.attr == "backward" if call.func is parent else call.func.attr == "grad")
    )


def is_value(source: Source, load: ast.Name) -> bool:
    """Whether a read needs only the value. The text of a tensor also has its graph."""
    parent = source.parents[load]
    if isinstance(parent, ast.Attribute):
        return parent.attr in _READS | _ATTRIBUTES | {"detach"}
    if isinstance(parent, ast.FormattedValue):
        return parent.format_spec is not None and parent.conversion == -1
    return _calls(parent) in ("float", "int")


def is_shown(source: Source, load: ast.Name) -> bool:
    """Whether a read shows the tensor, and keeps nothing."""
    parent = source.parents[load]
    return isinstance(parent, ast.FormattedValue) or _calls(parent) in ("print", "str")


# ---- Gradients ----


def is_default_clear(source: Source, statement: ast.stmt, optimizer: str) -> bool:
    """Whether a statement sets the gradients to None, as ``zero_grad()`` of an optimizer of torch does."""
    scope = source.scope_of(statement)
    stores = source.stores(scope, optimizer)
    call = statement.value if isinstance(statement, ast.Expr) else None
    # With set_to_none=False the optimizer also updates parameters whose gradient is zero.
    if not isinstance(call, ast.Call) or call.args or call.keywords or len(stores) != 1:
        return False
    made = _calls(getattr(source.parents[stores[0]], "value", None))
    is_short = any(isinstance(node, ast.alias) and _is_optim(source, node) for node in ast.walk(source.tree))
    is_torch = source.is_imported("torch") if made.startswith("torch.") else is_short
    replaced = [n for n in ast.walk(source.tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)]
    return (
        is_plain_target(source, stores[0])
        and is_torch
        and re.fullmatch(r"(torch\.)?optim\.[A-Z]\w*", made) is not None
        and not any(node.attr in ("zero_grad", "step") for node in replaced)
    )


def _is_optim(source: Source, node: ast.alias) -> bool:
    parent = source.parents[node]
    folder = f"{parent.module}." if isinstance(parent, ast.ImportFrom) else ""
    return f"{folder}{node.name}" == "torch.optim" and bound_by(node) == "optim"


def are_unread(source: Source, names: Iterable[Name], optimizer: str, body: Suite, first: int, last: int) -> bool:
    """Whether nothing can read gradients after the optimizer's step.

    Args:
        names: of the gradients.
        body: of the loop.
        first, last: numbers of the statements that clear the gradients and that use them.
    """
    scope = source.scope_of(body[0])
    function = getattr(scope, "name", "<module>")
    # A variable of a caller, or of another file, may be read there.
    if any((name.file, name.code.co_name if name.code else "<module>") != (source.file, function) for name in names):
        return False
    if any(isinstance(node, ast.Attribute) and node.attr in ("grad", "_grad") for node in ast.walk(source.tree)):
        return False
    between = [*body[last + 1 :], *body[:first]]
    node: ast.AST = source.parents[body[0]]
    while True:
        if not isinstance(node, ast.For | ast.While) or not _repeats_quietly(source, scope, node):
            return False
        outer = source.parents[node]
        if outer is scope:
            break
        between += [statement for statement in getattr(outer, "body", []) if statement is not node]
        node = outer
    if not all(_is_quiet(source, scope, statement) for statement in between):
        return False
    for root in {optimizer, *(name.variable for name in names)}:
        loads = source.loads(scope, root)
        if loads is None:
            return False
        for load in loads:
            in_round = any(source.inside(load, statement) for statement in body[first : last + 1])
            if not in_round and load.lineno >= node.lineno:
                return False
    return True


def _repeats_quietly(source: Source, scope: Scope, loop: ast.For | ast.While) -> bool:
    """Whether no other code of the program runs before each round. A generator is such code."""
    if isinstance(loop, ast.While):
        return is_known(source, scope, loop.test)
    made: list[ast.AST] = [loop.iter]
    if isinstance(loop.iter, ast.Name) and source.loads(scope, loop.iter.id) is not None:
        made = [getattr(source.parents[store], "value", store) for store in source.stores(scope, loop.iter.id)]
    is_range = all(_calls(one) == "range" for one in made) and not source.binds("range")
    return bool(made) and (is_range or all(isinstance(one, ast.List | ast.Tuple) for one in made))


def _is_quiet(source: Source, scope: Scope, statement: ast.stmt) -> bool:
    """Whether a statement only ends the step, computes with numbers, or shows them."""

    def known(*nodes: ast.expr) -> bool:
        return all(is_known(source, scope, node) for node in nodes)

    match statement:
        case ast.Pass():
            return True
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and known(value)
        case ast.AugAssign(target=ast.Name(), value=value):
            return known(value)
        case ast.If(test=test, body=body, orelse=orelse):
            return known(test) and all(_is_quiet(source, scope, one) for one in [*body, *orelse])
        case ast.Expr(value=ast.Call(func=function, args=args, keywords=keywords)):
            return _is_output(source, function) and known(*args, *(keyword.value for keyword in keywords))
    return False


def _is_output(source: Source, function: ast.expr) -> bool:
    """Whether a function is ``print``, writes a log, or ends the step."""
    if isinstance(function, ast.Name):
        return function.id == "print" and not source.binds("print")
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return False
    owner = function.value.id
    if function.attr in ("sync", "mark_step"):
        module = {"torch_xla": "torch_xla", "xm": "torch_xla.core.xla_model"}.get(owner)
        bound = [node for node in ast.walk(source.tree) if bound_by(node) in (owner, "*")]
        # `import torch_xla.runtime` binds torch_xla, too.
        return bool(bound) and all(
            isinstance(node, ast.alias) and (node.name if node.asname else node.name.partition(".")[0]) == module
            for node in bound
        )
    made = [getattr(source.parents[store], "value", None) for store in source.stores(source.tree, owner)]
    is_log = all(_calls(value) == "logging.getLogger" for value in made) if made else owner == "logging"
    return is_log and source.is_imported("logging") and function.attr in ("debug", "info", "warning")
