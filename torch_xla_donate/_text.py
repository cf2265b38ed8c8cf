"""Numbers and lists of reports and messages as text."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: int) -> str:
    """Bytes with a unit: '1.5 MiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def percent(fraction: float) -> str:
    """A percentage. '100.0%' only for 1.0."""
    return f"{fraction if fraction >= 1 else min(fraction, 0.999):.1%}"


def plural(count: int, one: str, many: str = "") -> str:
    """'1 donor', '1,234 donors'."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def cut(texts: Sequence[str], most: int, rest: str = "... and {:,} more") -> list[str]:
    """The first texts, and one for the number of the others."""
    return [*texts[:most], *([rest.format(len(texts) - most)] if len(texts) > most else [])]
