"""Python loads this file in each process of `make coverage`, and counts lines from then on.

The process loads the module whose C++ lines are counted, in place of the one in the package. `os._exit` skips what
coverage.py and libgcov do at the end of a process, so it writes both counts first.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

import coverage

MODULE = "torch_xla_donate._C"
# Tests import copies of the package, too.
PACKAGE = os.path.abspath(f"{__file__}/../../../../torch_xla_donate")


class _CountedModule(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != MODULE or PACKAGE not in (path or ()):
            return None
        return importlib.util.spec_from_file_location(MODULE, os.environ["COVERED_MODULE"])


def _counted_exit(status: int) -> NoReturn:
    with contextlib.suppress(Exception):
        current = coverage.Coverage.current()
        if current is not None:
            current.save()
        if MODULE in sys.modules:
            ctypes.CDLL(os.environ["COVERED_MODULE"]).torch_xla_donate_dump_coverage()
    _exit(status)


_exit = os._exit
os._exit = _counted_exit
sys.meta_path.insert(0, _CountedModule())
coverage.process_startup()
