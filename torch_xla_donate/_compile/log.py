"""Logs the time of compilations, and writes lowered modules to a folder."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_xla_donate import _host

logger = logging.getLogger("torch_xla_donate")


class Count:
    """The number of graphs that were compiled in a context. Set when the context ends."""

    value = 0


@contextmanager
def compilations(function: str) -> Iterator[Count]:
    """Logs the time that XLA takes for graphs compiled inside, at level INFO."""
    before = _host.compilations()
    found = Count()
    yield found
    found.value = count = _host.compilations() - before
    if count > 0 and logger.isEnabledFor(logging.INFO):
        graphs = "" if count == 1 else f" ({count} graphs)"
        logger.info("compiled %s in %.3f s%s", function, _host.compile_seconds(count), graphs)


@contextmanager
def compilation_for(function: str, topology: str) -> Iterator[None]:
    """Logs the time of a compilation for a topology, at level INFO."""
    begin = time.perf_counter()
    yield
    logger.info("compiled %s for %s in %.3f s", function, topology, time.perf_counter() - begin)


def dump_lowered(function: str, text: Callable[[], str]) -> None:
    """Writes a module before XLA's optimisation to the folder ``TORCH_XLA_DONATE_DUMP_IR``, if that is set.

    Writes the same module once. The file's name consists of the function's name and a hash of the text.
    """
    folder = os.environ.get("TORCH_XLA_DONATE_DUMP_IR")
    if not folder:
        return
    module = text()
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", function).strip("._") or "function"
    path = Path(folder, f"{name[:100]}.{hashlib.sha256(module.encode()).hexdigest()[:12]}.hlo.txt")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module, encoding="utf-8")
