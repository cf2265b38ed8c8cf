"""The HTML page of a run: well-formed, without outside resources, escaped, and of bounded size."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections import Counter
from html.parser import HTMLParser

import pytest

from torch_xla_donate._tools import page
from torch_xla_donate._tools.summary import Moment, RunSummary, SkippedFile, StepDonor, StepSummary
from torch_xla_donate.hlo import MemoryAnalysis

# matplotlib imports pyparsing by names that the latter has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MIB = 1 << 20
EVIL = "<script>alert('&')</script>\"x"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """The elements of a page. Fails for an end tag that closes another element than the open one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("style", "script"):
            self.words.append(data)
            if {"td", "th"} & set(self._open):
                self.rows[-1][-1] = " ".join(f"{self.rows[-1][-1]} {data}".split())

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def donor(parameter: int, output: int | None = 0, **others) -> StepDonor:
    reason = "" if output is not None else "no output has 4194304 bytes on a device"
    return StepDonor(parameter, "f32[1024,1024]", 4 * MIB, "marked", output=output, reason=reason, **others)


DONATED, PLAIN = MemoryAnalysis(8 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 0), MemoryAnalysis(8 * MIB, 4 * MIB, 0, 0, 0)
STEP = StepSummary(
    module="SyncTensorsGraph.12",
    file="dump/module_0001.txt",
    parameters=2,
    outputs=1,
    donors=(donor(0, name="['w']", where="train.py:8", copied_bytes=4 * MIB), donor(1, None, name="['g']")),
    aliases=1,
    memory=DONATED,
    undonated=PLAIN,
    executed=120,
    sites=("train.py:9",),
)
BARE = StepSummary("SyncTensorsGraph.3", "", 1, 1, (), 0)
RUN = RunSummary("train.py --epochs 3", (STEP, BARE), (Moment(0, MIB, 2 * MIB),), (SkippedFile("m.txt", "no HLO"),), 0)


@pytest.mark.parametrize("advice", [None, ()])
def test_the_page_says_whose_advice_it_is(advice) -> None:
    shown = Page(page.render(dataclasses.replace(RUN, advice=advice, advice_note="The advice is that of main.")))
    assert "The advice is that of main." in shown.text
    assert ("Nothing to gain" in shown.text) == (advice == ())


def test_the_page_has_every_part() -> None:
    shown = Page(page.render(RUN))
    for words in (
        "Buffer donation of train.py --epochs 3",
        "Donated, of the bytes offered 50.0%",
        "Not donated 4.0 MiB",
        "Donated, over all runs 480.0 MiB",
        "Largest peak of a step 12.0 MiB Largest peak, not donated 12.0 MiB",
        "Exit code of the program 0",
        "1. SyncTensorsGraph.12 1 of 2 donors donated, 4.0 MiB",
        "2. SyncTensorsGraph.3 0 of 0 donors donated, 0 B",
        "synced at train.py:9",
        "XLA copies 4.0 MiB of donated arrays at each run (['w'])",
        "Aliased, yet a full extra temporary copy: outputs reuse 4.0 MiB",
        "The step has no donors.",
    ):
        assert words in shown.text, words
    assert ["0", "['w'] train.py:8", "f32[1024,1024]", "4.0 MiB", "marked", "0", "", "4.0 MiB"] in shown.rows
    loss = ["['g']", "f32[1024,1024]", "4.0 MiB"]
    assert ["1", *loss, "marked", "none", "no output has 4194304 bytes on a device", ""] in shown.rows
    assert ["1", "1", *loss, "no output has 4194304 bytes on a device"] in shown.rows  # among the biggest losses
    assert ["temporaries", "4.0 MiB", "0 B"] in shown.rows
    assert ["m.txt", "no HLO"] in shown.rows
    assert len(shown.all("svg")) == 2


def test_a_topology_stands_beside_this_machine() -> None:
    there = dataclasses.replace(STEP, topology="v6e:2x2", donors=(donor(0, None), donor(1, 0)), memory=PLAIN)
    shown = Page(page.render(RunSummary("x", (dataclasses.replace(STEP, on_topology=there),))))
    assert ["bytes", "donated", "not donated", "v6e:2x2, donated", "v6e:2x2, not donated"] in shown.rows
    (row,) = [row for row in shown.rows if row[:2] == ["1", "['g']"]]
    assert row[5:7] == ["none", "0 (4.0 MiB)"]
    assert sum(attributes.get("class") == "differs" for attributes in shown.all("tr")) == 2
    assert "v6e:2x2: no output has 4194304 bytes on a device" in shown.text
    assert len(shown.all("svg")) == 2


def test_no_resource_comes_from_outside() -> None:
    text = page.render(RUN)
    shown = Page(text)
    for tag, attributes in shown.elements:
        assert tag not in ("script", "link", "iframe", "object", "img", "base")
        for name, value in attributes.items():
            if name in ("src", "srcset", "data", "href", "xlink:href", "action"):
                assert value.startswith("#"), (tag, value)
    assert set(re.findall(r"url\(([^)#]*)", text)) <= {""}
    assert "@import" not in text
    links = {attributes["href"][1:] for attributes in shown.all("a")}
    ids = Counter(attributes["id"] for _, attributes in shown.elements if "id" in attributes)
    assert links and links <= set(ids)
    assert max(ids.values()) == 1


def test_texts_of_the_program_are_escaped() -> None:
    evil = dataclasses.replace(
        STEP,
        module=EVIL,
        file=EVIL,
        donors=(donor(0, None, name=EVIL, where=EVIL), dataclasses.replace(donor(1), array=EVIL, reason=EVIL)),
        sites=(EVIL,),
        topology="",
    )
    evil = dataclasses.replace(evil, on_topology=dataclasses.replace(evil, topology=EVIL))
    text = page.render(RunSummary(EVIL, (evil,), (Moment(0, 1, 2),), (SkippedFile(EVIL, EVIL),)))
    shown = Page(text)
    assert shown.all("script") == []
    assert EVIL in shown.text
    assert "<script" not in text


def test_a_reader_without_eyes_finds_the_way() -> None:
    shown = Page(page.render(RUN))
    assert shown.all("html") == [{"lang": "en"}]
    assert len(shown.all("h1")) == len(shown.all("main")) == len(shown.all("title")) - len(shown.all("svg")) == 1
    assert all(attributes.get("scope") in ("col", "row") for attributes in shown.all("th"))
    assert all(attributes.get("role") == "img" for attributes in shown.all("svg"))
    regions = [attributes for attributes in shown.all("div") if attributes.get("role") == "region"]
    assert regions and all(attributes["aria-label"] and attributes["tabindex"] == "0" for attributes in regions)
    levels = [int(tag[1]) for tag, _ in shown.elements if re.fullmatch(r"h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def contrast(first: str, second: str) -> float:
    """As WCAG 2 defines it, of two colours such as #1f2328."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_has_enough_contrast(scheme) -> None:
    style = re.search(r"<style>(.*?)</style>", page.render(RunSummary("x", ())), re.DOTALL)[1]
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--(\w+): (#\w+)", blocks[scheme]))
    for text in ("text", "soft", "link", "good", "bad"):
        for ground in ("page", "panel", "mark"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def test_a_run_without_steps_says_so() -> None:
    shown = Page(page.render(RunSummary("empty", ())))
    assert "No step was found." in shown.text
    assert "nothing offered" in shown.text


def test_many_steps_stay_small_and_say_what_is_omitted() -> None:
    many = tuple(donor(number, None if number % 3 == 0 else number) for number in range(300))
    steps = [dataclasses.replace(STEP, module=f"Sync.{number}", donors=many) for number in range(400)]
    small, large = (page.render(RunSummary("x", tuple(steps[:count]))) for count in (200, 400))
    shown = Page(large)
    assert len(large) < 2 * len(small)
    assert all(f"Sync.{number}" in shown.text for number in range(400))
    assert len(shown.all("details")) == 400
    assert len(shown.all("svg")) == 40
    assert "Only the 40 steps that take the most memory have a picture." in shown.text
    # 10,000 rows for 400 steps: the 25 first ones are losses.
    assert "275 more donors of 1.1 GiB are not listed, 75 of them not donated." in shown.text
    assert "39,990 smaller losses of 156.2 GiB are not listed." in shown.text


def test_the_steps_that_take_the_most_have_pictures() -> None:
    steps = [dataclasses.replace(STEP, memory=MemoryAnalysis(n * MIB, 0, 0, 0, 0), undonated=None) for n in range(60)]
    text = page.render(RunSummary("x", tuple(steps)))
    pictured = {int(number) for number in re.findall(r'id="m(\d+)-figure_1"', text)}
    assert pictured == set(range(21, 61))


@pytest.mark.parametrize(
    ("module", "need"), [("jinja2", "the page of a report needs Jinja2"), ("matplotlib", "the pic")]
)
def test_a_missing_package_is_named_in_one_line(monkeypatch, module, need) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module] + [module]:
        monkeypatch.setitem(sys.modules, name, None)  # as Python does for a module that is not there
    with pytest.raises(ImportError, match=need) as caught:
        page.render(RUN)
    assert 'pip install "torch_xla_donate[report]"' in str(caught.value)
    assert "\n" not in str(caught.value)
