"""The package is built in floors: a module imports its own folder and lower floors only."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "torch_xla_donate"
FLOORS = [
    {"_errors", "_config", "_frames", "_lazily", "_locks", "_numbers", "_text"},
    {"_absent", "_checks", "hlo"},
    {"_C"},
    {"_host", "_trees"},
    {"_report", "_trace"},
    {"_marks", "_modes"},
    {"_compile", "_loops", "_computations"},
    {"_tools", "testing"},
    {"__init__", "_doctor", "_pages"},
    {"__main__", "_pytest"},
]
CPP_FLOORS = ["elf", "host", "repairs", "registry", "step", "features", "python"]
FLOOR = {name: number for number, floor in enumerate(FLOORS) for name in floor}


def imported(path: Path) -> set[str]:
    """The modules and names that a module imports from the package, also inside functions and for type checkers only.

    Relative to the package: `_marks.donate`, `_marks.donate.donate_buffer`.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name.partition(".")[2] for name in found if name.startswith("torch_xla_donate.")}


def test_imports_go_down_only() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        others = {name.split(".")[0] for name in imported(path)} - {part} if part != "__init__" else set()
        wrong += [f"{path.relative_to(PACKAGE)} imports {name}" for name in others if FLOOR[name] >= FLOOR[part]]
    assert wrong == []


def test_includes_go_down_only() -> None:
    wrong, lower = [], 0
    for path in sorted((PACKAGE.parent / "csrc").glob("*/*.[hc]*")):
        floor = CPP_FLOORS.index(path.parent.name)
        for name in re.findall(r'^#include "(\w+)/', path.read_text(encoding="utf-8"), re.MULTILINE):
            lower += CPP_FLOORS.index(name) < floor
            wrong += [f"{path.parent.name}/{path.name} includes {name}/"] * (CPP_FLOORS.index(name) > floor)
    assert wrong == []
    assert lower > 100


def test_no_modules_import_each_other_in_a_ring() -> None:
    """Also not for type checkers only: such modules are one, and cannot be read one after the other."""
    paths = {str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."): path for path in PACKAGE.rglob("*.py")}
    graph = {
        module: {name for found in imported(path) for name in (found, found.rpartition(".")[0]) if name in paths}
        for module, path in paths.items()
    }
    assert "_compile.executable" in graph["_compile.lower"]
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"these import each other: {error.args[1]}") from None


def test_only_the_host_folder_knows_torch_xlas_layouts() -> None:
    csrc = PACKAGE.parent / "csrc"
    readers = {
        path.parent.name
        for path in csrc.rglob("*")
        if path.suffix in (".h", ".cpp") and '#include "host/layouts.h"' in path.read_text(encoding="utf-8")
    }
    assert readers == {"host"}


def test_no_frame_is_read_by_f_locals() -> None:
    """It changes the program's `locals()` before Python 3.13. `_C.frame_variables` does not."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "f_locals"
    ]
    assert wrong == []


def test_every_lock_of_the_package_is_usable_after_a_fork() -> None:
    makers = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"Lock", "RLock", "Condition", "Semaphore"}
    }
    assert makers == {"_locks.py"}


def test_every_mutex_of_the_module_is_usable_after_a_fork() -> None:
    """`ProcessMutex` is. The registry has its own handlers of a fork; hooks are installed by the import."""
    csrc = PACKAGE.parent / "csrc"
    own = re.compile(r"^ *(static |mutable )*std::(recursive_|shared_)?mutex\*? \w+(;| = new|\{)", re.MULTILINE)
    owners = {
        str(path.relative_to(csrc))
        for path in csrc.rglob("*")
        if path.suffix in (".h", ".cpp") and own.search(path.read_text(encoding="utf-8"))
    }
    assert owners <= {"elf/patch.cpp", "registry/thread_safety.h", "step/hooks.cpp"}
