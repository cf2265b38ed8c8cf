"""Decides from the source whether an edit keeps a program's values. In doubt it does not."""

from __future__ import annotations

import ast
from typing import Any

import torch

from torch_xla_donate._tools.source import Scope, Source

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
                parts = [*node.args, *(keyword.value for keyword in node.keywords)]
                return known(owner) and all(isinstance(one, ast.Constant | ast.Name | ast.Attribute) for one in parts)
            given = [
                keyword.value
                for keyword in node.keywords
                if keyword.arg not in ("device", "dtype") or isinstance(keyword.value, ast.Call)
            ]
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
    return _is_operator(value, ast.BinOp | ast.UnaryOp) or (is_call and value.func.attr in _NEW)  # type: ignore[attr-defined]


def _is_operator(node: ast.AST, kinds: Any) -> bool:
    """Whether a node computes a new value. ``+x`` is `x`."""
    return isinstance(node, kinds) and not isinstance(getattr(node, "op", None), ast.UAdd)


def only_computes(source: Source, scope: Scope, load: ast.Name) -> bool:
    """Whether a read only computes with the value, so that it makes no other name for it."""
    node: ast.AST = load
    while True:
        parent = source.parents[node]
        call = source.parents[parent]
        if _is_operator(parent, _OPERATORS) or (isinstance(parent, ast.Call) and makes_array(parent)):
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
