"""The stub of the extension module names what the module has: functions, their parameters, classes and attributes."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla

import torch_xla_donate
from torch_xla_donate import _C, auto_donate, debug_nans, donate_buffer

STUB = Path(torch_xla_donate.__file__).with_name("_C.pyi")
BODY = ast.parse(STUB.read_text(encoding="utf-8")).body
FUNCTIONS = {node.name: node for node in BODY if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in BODY if isinstance(node, ast.ClassDef)}
PLAIN = {"int", "str", "bool", "bytes", "None"}  # types that pybind11 and the stub write alike


def public(names: Any) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def parameters(node: ast.FunctionDef) -> list[str]:
    """Names, each with a mark if it has a default."""
    plain, defaults = node.args.args, node.args.defaults
    required = len(plain) - len(defaults)
    return [arg.arg + ("=" if i >= required else "") for i, arg in enumerate(plain) if arg.arg != "self"]


def documented(function: Any) -> tuple[list[str], list[str], str]:
    """Names of the parameters, their types and that of the result, as pybind11 writes them."""
    line = function.__doc__.splitlines()[0]
    inside, _, result = line.partition("(")[2].rpartition(") -> ")
    pieces = re.findall(r"(\w+): ((?:[^,\[(]|\[[^()]*?\](?=[,\] =]|$)|\([^)]*\))+)", inside)
    found = [(name, kind) for name, kind in pieces if name != "self"]
    names = [name + ("=" if " = " in kind else "") for name, kind in found]
    return names, [kind.partition(" = ")[0] for _, kind in found], result


def test_the_stub_has_the_names_of_the_module() -> None:
    assert public([*FUNCTIONS, *CLASSES]) == public(vars(_C))


def test_a_function_has_the_parameters_of_the_stub() -> None:
    """mypy's stubtest compares names only, as pybind11 gives signatures in docstrings."""
    for name, node in FUNCTIONS.items():
        names, kinds, result = documented(getattr(_C, name))
        assert names == parameters(node), name
        for argument, kind in zip(node.args.args, kinds, strict=True):
            assert argument.annotation is not None
            assert kind not in PLAIN or ast.unparse(argument.annotation) == kind, name
        assert node.returns is not None
        returned = ast.unparse(node.returns)
        assert returned == result or not {returned, result} & PLAIN, name


def test_a_class_has_the_attributes_of_the_stub() -> None:
    for name in public(CLASSES):
        kind, node = getattr(_C, name), CLASSES[name]
        methods = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
        assert public(methods) | {*keys(name)} == public(vars(kind)), name
        assert {name for name in methods if name.startswith("__")} <= {*vars(kind), "__eq__"}
        assert {*keys(name)} == {member for member, found in vars(kind).items() if isinstance(found, property)}, name


def keys(name: str) -> list[str]:
    return [item.target.id for item in CLASSES[name].body if isinstance(item, ast.AnnAssign)]  # type: ignore[union-attr]


def test_a_dictionary_has_the_keys_of_the_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.ones(3).to("xla")
    torch_xla.sync(wait=True)
    donate_buffer(t)
    assert list(_C.pending()[-1]) == keys("_Donor")
    out = t + 1
    torch_xla.sync(wait=True)
    assert list(_C.steps()[-1]) == keys("_Step")
    assert list(_C.hooks()[0]) == keys("_Hook")
    with debug_nans(), auto_donate():
        bad = out / 0 - out / 0
        take = _C.take_bad_outputs
        monkeypatch.setattr(_C, "take_bad_outputs", list)  # the step asks, and gets nothing
        torch_xla.sync(wait=True)
        assert list(take()[0]) == keys("_BadOutput")
    assert bad.shape == (3,)
