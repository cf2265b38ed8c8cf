"""The pictures of a step's memory and of a run: the bytes that they show, and SVG that follows the page."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from torch_xla_donate._tools import pictures
from torch_xla_donate._tools.summary import Moment, RunSummary, StepSummary
from torch_xla_donate.hlo import MemoryAnalysis

# matplotlib imports pyparsing by names that the latter has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

KIB = 1 << 10
MIB = 1 << 20
SVG = "{http://www.w3.org/2000/svg}"
DONATED = MemoryAnalysis(4 * MIB, 4 * MIB, 4 * MIB, 1 * MIB, 0)
PLAIN = MemoryAnalysis(4 * MIB, 4 * MIB, 0, 0, 0)
STEP = StepSummary("Sync<&>Graph.12", "", 1, 1, (), 1, DONATED, PLAIN)


def run(*moments: Moment) -> RunSummary:
    return RunSummary("train.py", (STEP,), moments)


def texts(svg: str) -> list[str]:
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def bars(svg: str, colour: str) -> list[tuple[float, float]]:
    """The left and right ends of the filled shapes of a colour, from the top of the picture."""
    found = []
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if path.get("clip-path") and f"fill: var(--{colour})" in path.get("style", ""):
            numbers = [tuple(map(float, pair)) for pair in re.findall(r"([\d.]+) ([\d.]+)", path.get("d", ""))]
            xs, ys = zip(*numbers)
            found.append((min(ys), min(xs), max(xs)))
    return [(left, right) for _, left, right in sorted(found)]


def test_bars_have_the_lengths_of_the_bytes() -> None:
    svg = pictures.memory_picture(STEP)
    (kept, plain), (reused, _) = bars(svg, "kept"), bars(svg, "aliased")
    (none, new), (extra, _) = bars(svg, "new"), bars(svg, "temporary")
    mib = (reused[1] - reused[0]) / 4
    assert mib > 10
    widths = [right - left for left, right in (kept, plain, none, new, extra)]
    assert widths == pytest.approx([0, 4 * mib, 0, 4 * mib, mib], abs=0.01)
    assert extra[0] == pytest.approx(reused[1])


def test_the_text_is_text_and_names_the_peaks() -> None:
    svg = pictures.memory_picture(STEP)
    assert {"donated", "not donated", "arguments", "reused by outputs", "new outputs", "temporaries"} < set(texts(svg))
    assert {"5.0 MiB", "8.0 MiB", "MiB on a device during a run"} < set(texts(svg))
    title = ElementTree.fromstring(svg).findtext(f"{SVG}title")
    assert title == "Memory of a run of Sync<&>Graph.12: donated 5.0 MiB, not donated 8.0 MiB"


def test_without_a_second_compilation_there_is_one_bar() -> None:
    svg = pictures.memory_picture(StepSummary("m", "", 1, 1, (), 1, DONATED))
    assert "not donated" not in texts(svg)
    assert len(bars(svg, "aliased")) == 1


def test_colours_follow_the_scheme_of_the_page() -> None:
    for svg in (pictures.memory_picture(STEP), pictures.timeline_picture(run(Moment(0, 1, 2)))):
        drawing, style = re.sub(r"<style>.*?</style>", "", svg), re.search(r"<style>(.*?)</style>", svg)[1]
        assert re.findall(r"#[0-9a-f]{6}", drawing) == []
        used = set(re.findall(r"var\(--(\w+)\)", drawing))
        light, dark = style.split("@media (prefers-color-scheme: dark)")
        assert used <= set(re.findall(r"--(\w+):", light)) == set(re.findall(r"--(\w+):", dark))
        assert "ink" in used


def test_equal_data_give_equal_text_and_prefixes_keep_ids_apart() -> None:
    assert pictures.memory_picture(STEP) == pictures.memory_picture(STEP)
    first, second = (pictures.memory_picture(STEP, prefix=prefix) for prefix in ("a-", "b-"))
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0] and not ids[0] & ids[1]
    for svg, known in zip((first, second), ids):
        assert (
            set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg))
            and {one or other for one, other in re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)} <= known
        )


def test_no_picture_has_an_outside_resource() -> None:
    svg = pictures.memory_picture(STEP)
    assert set(re.findall(r'(\S+)="http[^"]*"', svg)) <= {"xmlns", "xmlns:xlink"}
    assert "<metadata" not in svg and "<?xml" not in svg


def test_a_timeline_has_each_run() -> None:
    svg = pictures.timeline_picture(run(Moment(0, 300 * KIB, 400 * KIB), Moment(0, 200 * KIB, 200 * KIB)))
    assert {"KiB on a device", "live before the run", "added by the run"} < set(texts(svg))
    title = ElementTree.fromstring(svg).findtext(f"{SVG}title")
    assert title == "Live bytes of 2 runs of steps, at most 400.0 KiB during a run"


def test_a_long_timeline_keeps_its_peak_and_stays_small() -> None:
    moments = [Moment(0, MIB, 2 * MIB)] * 100_000
    moments[77_777] = Moment(0, MIB, 3 * MIB)
    svg = pictures.timeline_picture(run(*moments))
    assert "100000 runs of steps, at most 3.0 MiB" in svg
    assert len(svg) < 3 * len(pictures.timeline_picture(run(*moments[: pictures.MOMENTS])))


def test_a_timeline_of_nothing_alive_is_drawn() -> None:
    assert "bytes on a device" in texts(pictures.timeline_picture(run(Moment(0, 0, 0))))


def test_unknown_memory_and_an_empty_timeline_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step m has no memory to draw\. Give a step whose memory is known\."):
        pictures.memory_picture(StepSummary("m", "", 1, 1, (), 1))
    with pytest.raises(ValueError, match=r"the timeline of 'train\.py' is empty\. Give a run of a program\."):
        pictures.timeline_picture(run())


def test_without_matplotlib_the_error_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)  # as Python does for a module that is not there
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "torch_xla_donate\[report\]"') as caught:
        pictures.memory_picture(STEP)
    assert "\n" not in str(caught.value)
