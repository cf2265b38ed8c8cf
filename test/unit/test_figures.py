"""The figure of docs/benchmarks.md shows the committed results."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import pytest

# matplotlib imports pyparsing by names that the latter has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import figures

    yield figures
    del sys.modules["figures"]


def test_the_figure_is_drawn_from_the_committed_results(figures, tmp_path) -> None:
    figures.draw(ROOT / "benchmarks" / "results", tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == figures.FIGURE.read_bytes()


def test_a_missing_result_is_an_error(figures, tmp_path) -> None:
    with pytest.raises(click.ClickException, match=r"peak_memory\.json is missing"):
        figures.draw(tmp_path, tmp_path / "drawn.svg")
    assert not (tmp_path / "drawn.svg").exists()
