"""What `advise` finds in the steps of a loop, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch_xla_donate import Advice
from torch_xla_donate._modes import debug
from torch_xla_donate._tools.step_watch import StepWatch


@contextlib.contextmanager
def watching() -> Iterator[StepWatch]:
    """Watches the steps of this thread."""
    watch = StepWatch()
    with debug.listening(watch.note):
        yield watch


def repeated(watch: StepWatch) -> Advice:
    """The hints that two steps have shown. The first step of a loop differs from the others."""
    return Advice(hint for hint in watch.advice() if hint.runs >= 2)
