"""The rules of the test suite that a test can check, read from the files of the tests."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILES = {str(path.relative_to(TESTS)): ast.parse(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}

# A child of the first does not end before a guard ends it; the fuzzer stops after the minutes that it is given.
CLOCKS = {"process/test_children.py", "fuzz/farm.py", "fuzz/run.py"}


def long_names(source: ast.Module) -> list[str]:
    functions = (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef))
    return [f.name for f in functions if f.name.startswith("test_") and len(f.name) > 60]


def imported(source: ast.Module) -> Iterator[str]:
    """The modules that a file imports, also inside functions."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_names_are_counted() -> None:
    source = ast.parse(f"class A:\n  def test_{'x' * 55}(self): ...\n  def test_{'y' * 56}(self): ...")
    assert long_names(source) == [f"test_{'y' * 56}"]


def test_imports_are_found() -> None:
    source = ast.parse("import os, time\ndef f():\n  from time import sleep\n  import torch.nn")
    assert list(imported(source)) == ["os", "time", "time", "torch.nn"]


def test_names_have_at_most_sixty_characters() -> None:
    found = {name: long_names(source) for name, source in FILES.items()}
    assert {name: names for name, names in found.items() if names} == {}


def test_each_nightly_file_has_its_reason() -> None:
    text = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(test_\w+\.py)` \|", text, re.MULTILINE)
    assert named == sorted(path.name for path in (TESTS / "nightly").glob("test_*.py"))


def test_no_file_has_a_clock() -> None:
    assert {name for name, source in FILES.items() if "time" in imported(source)} == CLOCKS


def test_every_build_of_make_has_the_assertions_of_libstdcxx() -> None:
    makefile = (TESTS.parent / "Makefile").read_text(encoding="utf-8")
    builds = makefile.count("-DTORCH_XLA_DONATE_OUTPUT=")
    assert builds >= 2 and makefile.count("-DTORCH_XLA_DONATE_ASSERTIONS=ON") == builds
