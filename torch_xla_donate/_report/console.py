"""Shows tables of rich. Imported late, because a training loop does not need rich."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType


def console(**options: Any) -> Console:
    """A console for tables. Names and paths may look like rich's markup, and are shown as they are."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def render(table: RenderableType, width: int = 120) -> str:
    """The table as text, without colours and trailing blanks."""
    out = io.StringIO()
    console(file=out, width=width, no_color=True, legacy_windows=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
