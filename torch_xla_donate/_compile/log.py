"""What is told of compilations: their time, in the log; and the lowered modules, in a folder."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_xla_donate import _host

logger = logging.getLogger("torch_xla_donate")


class Count:
    """How many graphs have been compiled in a context that is over."""

    value = 0


@contextmanager
def compilations(function: str) -> Iterator[Count]:
    """Logs, at level INFO, the time that XLA takes for graphs that are compiled inside; nothing if there are none."""
    before = _host.compilations()
    found = Count()
    yield found
    found.value = count = _host.compilations() - before
    if count > 0 and logger.isEnabledFor(logging.INFO):
        graphs = "" if count == 1 else f" ({count} graphs)"
        logger.info("compiled %s in %.3f s%s", function, _host.compile_seconds(count), graphs)


def dump_lowered(function: str, text: Callable[[], str]) -> None:
    """Writes a module, as it is before XLA optimises it, to the folder ``TORCH_XLA_DONATE_DUMP_IR``, if that is set.

    The same module is written once. The file's name is the function's with what file names do not bear replaced, and a
    hash of the text.
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
