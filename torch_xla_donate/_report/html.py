"""Renders reports as HTML for notebooks: one element, without scripts and outside resources."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from torch_xla_donate._report import table

if TYPE_CHECKING:
    from torch_xla_donate._report.report import DonationReport

_ROWS = 1000
# Of the page's own text colour, so that it fits light and dark pages.
_LINE = "1px solid color-mix(in srgb, currentColor 25%, transparent)"
_CELL = f"padding:.25em .75em;border-bottom:{_LINE};text-align:left;vertical-align:top"
# On a narrow page the table scrolls sideways, and only the reasons are broken into lines.
_WIDTHS = ["white-space:nowrap"] * (len(table.COLUMNS) - 1) + ["min-width:20em"]


def report(found: DonationReport) -> str:
    """A report with its first 1,000 donors as an HTML element."""
    if not found.donors and not found.pending:
        return f"<div>{_paragraphs([table.NO_DONORS, *table.notes(found)])}</div>"
    cells = table.rows(found)
    more = [f"... and {len(cells) - _ROWS} more; see .to_dict()"] if len(cells) > _ROWS else []
    body = "".join(f"<tr>{_cells('td', row)}</tr>" for row in cells[:_ROWS])
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse">'
        f'<caption style="text-align:left;font-weight:bold;padding:.25em 0">{escape(table.summary(found))}</caption>'
        f"<thead><tr>{_cells('th', table.COLUMNS)}</tr></thead><tbody>{body}</tbody></table>"
        f"{_paragraphs([*more, *table.notes(found)])}</div>"
    )


def _cells(tag: str, texts: Iterable[str]) -> str:
    cells = zip(texts, _WIDTHS)
    return "".join(f'<{tag} style="{_CELL};{width}">{escape(text)}</{tag}>' for text, width in cells)


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f'<p style="white-space:pre-wrap">{escape(text)}</p>' for text in texts)
