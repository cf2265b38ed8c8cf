"""Python loads this file in each process that run.py starts, and in their children.

It writes down the outcome of each test. With automatic donation it imports the package right after torch_xla. Earlier
actions of a test file, like setting the environment, stay in effect.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

RECORD = Path(os.environ["UPSTREAM_RECORD"])
AUTO = os.environ.get("TORCH_XLA_DONATE_AUTO") == "1"
# As text in the record. A test that ends the process leaves the first.
OUTCOMES = {
    "startTest": "ended the process",
    "addSuccess": "passed",
    "addError": "error",
    "addFailure": "failed",
    "addSkip": "skipped",
    "addExpectedFailure": "failed as expected",
    "addUnexpectedSuccess": "passed unexpectedly",
}


def write(**line: Any) -> None:
    # Line by line, so that nothing is lost if the process ends.
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def name_of(test: unittest.TestCase) -> str:
    # Names made of parameters may have addresses in them.
    return re.sub(r" at 0x[0-9a-f]+", "", test.id())


def recording(method: Callable[..., None], outcome: str) -> Callable[..., None]:
    def record(self: unittest.TestResult, test: unittest.TestCase, *arguments: Any) -> None:
        write(test=name_of(test), outcome=outcome)
        method(self, test, *arguments)

    return record


def recording_failures(method: Callable[..., None]) -> Callable[..., None]:
    def record(self: unittest.TestResult, test: unittest.TestCase, subtest: unittest.TestCase, error: Any) -> None:
        if error is not None:
            write(test=name_of(test), outcome="failed")
        method(self, test, subtest, error)

    return record


for name, outcome in OUTCOMES.items():
    setattr(unittest.TestResult, name, recording(getattr(unittest.TestResult, name), outcome))
setattr(unittest.TestResult, "addSubTest", recording_failures(unittest.TestResult.addSubTest))  # noqa: B010


def loaded() -> None:
    if AUTO:
        import torch_xla_donate

        write(auto=torch_xla_donate._C.auto_donates())

        # After this comes torch_xla's own end, which shuts the runtime down.
        @atexit.register
        def count() -> None:
            report = torch_xla_donate.donation_report()
            write(steps=report.donors[-1].step if report.donors else 0)


class AfterTorchXla(importlib.abc.MetaPathFinder):
    """Lets the import of torch_xla go on as always, and calls `loaded` at its end."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_xla":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            loaded()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AfterTorchXla())
