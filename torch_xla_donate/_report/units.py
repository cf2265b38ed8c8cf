"""Numbers of reports and messages as text."""

from __future__ import annotations


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
