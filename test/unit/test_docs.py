"""The documentation: its Python blocks run, its texts are what the code says, its links lead somewhere."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import inspect
import io
import re
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import messages
import pytest
import torch_xla
from children import run_file, run_in_child
from links import anchor
from message_pages import words

import torch_xla_donate
from torch_xla_donate import _C, _host, _report
from torch_xla_donate._host import hooks
from torch_xla_donate._report import reasons

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES, *sorted((ROOT / "third_party").glob("*.md"))]


@dataclass
class Block:
    """A Python block of a page, and the text block that follows it, if one does."""

    line: int
    source: str
    expected: str | None


@dataclass
class Process:
    """Blocks that share a process."""

    env: dict[str, str] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)


FENCE = re.compile(
    r"(?:<!-- (?P<marker>fresh|env: [^>]*?) -->\n)?^```python\n(?P<source>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


def processes(page: Path) -> list[Process]:
    """A comment before a block starts a new process: `<!-- fresh -->`, or `<!-- env: NAME=VALUE ... -->`."""
    text = page.read_text(encoding="utf-8")
    found: list[Process] = []
    for match in FENCE.finditer(text):
        marker = match["marker"]
        if marker is not None or not found or found[-1].env:
            settings = (marker or "").removeprefix("env: ").split() if marker != "fresh" else []
            found.append(Process(dict(setting.split("=", 1) for setting in settings)))
        found[-1].blocks.append(Block(text.count("\n", 0, match.start()) + 1, match["source"], match["text"]))
    return found


def cases() -> Iterator[object]:
    for page in [ROOT / "README.md", *PAGES]:
        for process in processes(page):
            needs_jax = any(
                re.search("import jax|v6e|compile_for", block.source) for block in process.blocks
            ) and sys.version_info < (3, 11)
            skipped = [pytest.mark.skip(reason="jax 0.7.1 and torchax need Python 3.11")] if needs_jax else []
            yield pytest.param(process, id=f"{page.relative_to(ROOT)}:{process.blocks[0].line}", marks=skipped)


def run_blocks(sources: list[str]) -> list[str]:
    """Runs blocks one after another; for each, what it printed, warned of and raised."""
    namespace = {"__name__": "__main__", "__file__": "example.py"}
    results = []
    for source in sources:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", torch_xla_donate.DonationWarning)
        warnings.showwarning = lambda message, category, *rest: print(f"{category.__name__}: {message}")
        _report.notices._warned_sites.clear()
        _report.reuse._reported.clear()
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(compile(source, "example.py", "exec"), namespace)
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
        results.append(out.getvalue())
    return results


@pytest.mark.parametrize("process", cases())
def test_the_blocks_of_a_page_run_and_say_what_the_page_says(process: Process) -> None:
    results = run_in_child(run_blocks, [block.source for block in process.blocks], env=process.env).value
    for block, result in zip(process.blocks, results, strict=True):
        if block.expected is None:
            assert "Error: " not in result, f"the block at line {block.line} raised: {result}"
        else:
            assert words(result) == words(block.expected), f"the text after the block at line {block.line}"


def test_every_page_with_a_message_shows_it_running() -> None:
    shown = {page.name for page in PAGES if any(block.expected for p in processes(page) for block in p.blocks)}
    assert shown == {page.name for page in PAGES} - {
        "README.md",
        "benchmarks.md",
        "examples.md",
        "glossary.md",
        "how_it_works.md",
        "memory_model.md",
        "support.md",
        "troubleshooting.md",
    }


# --- The README ---


def test_the_readme_shows_the_output_of_the_quickstart() -> None:
    """Blanks at the ends of lines do not count."""
    output = run_file(ROOT / "examples" / "quickstart.py").stdout
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    printed = "\n".join(line.rstrip() for line in output.splitlines())
    assert f"```console\n$ python examples/quickstart.py\n{printed}\n```" in readme


def test_the_readme_names_the_versions_that_are_supported() -> None:
    assert f"torch_xla {_host.supported_versions()}" in (ROOT / "README.md").read_text(encoding="utf-8")


# --- Every message has a page ---


WRITTEN, REASONS = messages.written(), messages.reasons()
CASES = [(message.where, message.longest, message.page) for message in WRITTEN]
CASES += [(f"{message.where}: {piece[:30]}", piece, None) for message in REASONS for piece in message.pieces]


def test_the_messages_of_the_code_are_found() -> None:
    assert len(REASONS) >= len(reasons.SENTENCES) - 2  # one is empty, and one is all filled in
    assert len(WRITTEN) >= 100


def test_a_message_is_found_for_each_page_that_the_code_names() -> None:
    """`see(page)` ends a message, which the reader of the code finds with that page."""
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "torch_xla_donate").rglob("*.py"))
    named = set(re.findall(r"""\bsee\(["'](\w+)["']\)""", code))
    assert len(named) >= 15
    assert {message.page for message in WRITTEN} - {None} == named


def test_every_code_of_the_hooks_has_a_sentence() -> None:
    assert _C.reason_codes() == ["none", *reasons.SENTENCES]


def test_the_reasons_are_a_closed_set() -> None:
    """Codes of the hooks, cases of explain.py, and unread marks. docs/reasons.md lists each with its sentence."""
    explained = set(re.findall(r"Reason\.([A-Z_]+)", read("torch_xla_donate/_report/explain.py")))
    hooks = {code.name for code in reasons.SENTENCES}
    assert {reason.name for reason in reasons.Reason} == explained | hooks | {"UNREAD"}
    assert not explained & hooks
    rows = dict(re.findall(r"^\| `Reason\.(\w+)` \| `(.+?)` \|", read("docs/reasons.md"), re.MULTILINE))
    assert list(rows) == [reason.name for reason in reasons.Reason]
    for code, text in reasons.SENTENCES.items():
        assert rows[code.name] == text.replace("{details}", "..."), code


def test_the_package_gives_only_reasons_of_the_set() -> None:
    given = set()
    for path in (ROOT / "torch_xla_donate").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "Reason":
                given |= {
                    n.value for arg in node.args[:1] for n in ast.walk(arg) if isinstance(n, ast.Constant) and n.value
                }
    assert len(given) >= 12
    assert given <= {"none", *reasons.Reason}


def test_no_message_sends_users_to_a_private_name() -> None:
    for message in [*WRITTEN, *REASONS]:
        assert not re.search(r"torch_xla_donate\._", message.text), message.where


@pytest.mark.parametrize(("text", "page"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_every_message_of_the_code_has_a_page(text: str, page: str | None) -> None:
    """If the message names a page, that page has it."""
    pages = PAGES if page is None else [ROOT / "docs" / f"{page}.md"]
    assert words(text) in words(" ".join(path.read_text(encoding="utf-8") for path in pages))


def test_the_texts_of_the_page_on_import_errors_are_in_the_code() -> None:
    sources = [*(ROOT / "torch_xla_donate").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text(encoding="utf-8") for path in sources))
    page = (ROOT / "docs" / "import_errors.md").read_text(encoding="utf-8")
    shown = [text for row in re.findall(r"^\| (.+?) \|", page, re.MULTILINE) for text in re.findall("`(.+?)`", row)]
    assert len(shown) >= 8
    for text in shown:
        pieces = re.split(r"\.\.\.|2\.[\d., 789]+|\bon\b", text)
        assert all(piece.strip(" .()") in code for piece in pieces), text


def test_the_record_names_the_probe_of_the_layouts() -> None:
    probe, _ = hooks._probe(torch_xla.device())
    record = words((ROOT / "third_party" / "host_facts.md").read_text(encoding="utf-8"))
    assert f"a fresh {str(probe.dtype).removeprefix('torch.')}[{probe.numel()}] with known values" in record


# --- Tables, links, pictures ---


def test_the_table_of_hooks_is_the_table_of_the_code() -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w:]+)` \| (.+) \|$", page, re.MULTILINE)
    assert rows == [(hook["name"], hook["purpose"]) for hook in _C.hooks()]


def test_the_record_lists_every_hook_and_tests_that_exist() -> None:
    record = (ROOT / "third_party" / "host_facts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w:]+)` \| `(_Z\w+)` \|$", record, re.MULTILINE)
    assert len(rows) == len(_C.hooks())
    for hook, (name, symbol) in zip(_C.hooks(), rows):
        assert hook["name"] == name
        assert hook["symbol"].startswith(symbol)
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "test").rglob("test_*.py"))
    for page in LINKED:
        for name in re.findall(r"`(test_[a-z0-9_]{12,})`", page.read_text(encoding="utf-8")):
            assert f"def {name}(" in tests, f"{page.name} names {name}"


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return set(map(anchor, re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)))


@pytest.mark.parametrize("page", LINKED, ids=[str(page.relative_to(ROOT)) for page in LINKED])
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in headings(path), f"{page.name} links to {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert all(f"]({page.name})" in index for page in PAGES if page.name != "README.md")


FIGURES = [
    ROOT / "docs" / f"{name}.svg" for name in ("auto", "padded_sizes", "path_of_a_mark", "step")
]  # drawn by hand


@pytest.mark.parametrize("figure", FIGURES, ids=[figure.name for figure in FIGURES])
def test_a_figure_has_a_background_in_light_and_in_dark(figure: Path) -> None:
    root = ElementTree.parse(figure).getroot()
    pages = [rect for rect in root.iter("{http://www.w3.org/2000/svg}rect") if rect.get("class") == "page"]
    assert [page.get("fill") for page in pages] == ["#ffffff"]
    dark = figure.read_text(encoding="utf-8").partition("@media (prefers-color-scheme: dark)")[2]
    assert ".page { fill: #0d1117; }" in dark


def test_the_figure_of_a_mark_names_the_hooks() -> None:
    text = (ROOT / "docs" / "path_of_a_mark.svg").read_text(encoding="utf-8")
    assert all(hook["name"].rpartition("::")[2] in text for hook in _C.hooks())


def test_the_figure_of_a_step_names_phases_and_features() -> None:
    text = (ROOT / "docs" / "step.svg").read_text(encoding="utf-8")
    phases = re.search(r"enum class StepPhase \{(.*?)\};", read("csrc/step/thread_step.h"), re.DOTALL)
    assert phases is not None
    observer = read("csrc/step/observer.h").partition("class StepObserver")[2].partition("};")[0]
    members = set(re.findall(r"virtual \w+ (\w+)\(", observer)) - {"SeesTensors"}
    features = re.findall(r"FEATURE\((\w+)Feature\)", read("csrc/features/all.cpp"))
    assert len(members) >= 10
    assert len(features) >= 13
    for name in [phase.lower() for phase in re.findall(r"\bk(\w+),", phases[1])] + [*members] + features:
        assert name in text, name


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# --- Words ---

PROSE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
# test/prose.py, which `make lint` runs, finds words; this finds long sentences.


def sentences_of(text: str) -> Iterator[str]:
    """Without code, the tables that come from the code, and the targets of links."""
    text = re.sub(
        r"^ *```.*?^ *```$|<!-- table -->.*?<!-- end of table -->", "\n", text, flags=re.MULTILINE | re.DOTALL
    )
    text = re.sub(r"^\| function \| what for \|\n(\|.*\n)+", "", text, flags=re.MULTILINE)
    text = re.sub(r"`[^`]*`", "code", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    for unit in re.split(r"\n\s*(?=\n|- |#|\d+\. |\|)| \| ", text):
        yield from re.split(r"(?<=[.!?]) ", words(re.sub(r"^\s*(- |#+ |\d+\. |\|)|\|$", "", unit)))


def long_sentences(text: str) -> list[str]:
    return [sentence for sentence in sentences_of(text) if len(sentence.split()) > 25]


def test_long_sentences_are_found() -> None:
    long = " ".join(["word"] * 26)
    assert long_sentences(f"# A page\n\nXLA reuses `t`.\n- Fine. {long}.\n\n| a | {long} |\n") == [f"{long}.", long]
    assert long_sentences(f"`{long}`\n\n```text\n{long}\n```\n\nOne fact. [Another](of_its_own.md).\n") == []


@pytest.mark.parametrize("page", PROSE, ids=[str(page.relative_to(ROOT)) for page in PROSE])
def test_a_page_has_sentences_of_at_most_25_words(page: Path) -> None:
    assert long_sentences(page.read_text(encoding="utf-8")) == []


# --- The reference ---


def sections() -> dict[str, tuple[str, str]]:
    """For each name of the reference, its heading and the text below."""
    parts = re.split(r"^### `(.+)`$", read("docs/reference.md"), flags=re.MULTILINE)[1:]
    return {
        heading.partition("(")[0]: (heading, re.split(r"^## ", text, flags=re.MULTILINE)[0])
        for heading, text in zip(parts[::2], parts[1::2])
    }


def public() -> dict[str, object]:
    names = {name: getattr(torch_xla_donate, name) for name in torch_xla_donate.__all__}
    modules = {"hlo": torch_xla_donate.hlo, "testing": torch_xla_donate.testing}
    return names | {f"{name}.{member}": getattr(of, member) for name, of in modules.items() for member in of.__all__}


def plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """Without annotations; a default that is a function has its name."""
    default = parameter.default
    if inspect.isfunction(default):
        default = Named(default.__name__)
    return parameter.replace(annotation=inspect.Parameter.empty, default=default)


class Named(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def test_the_reference_lists_the_public_names() -> None:
    assert sorted(sections()) == sorted(public())


@pytest.mark.parametrize("name", sorted(public()))
def test_the_reference_gives_signatures_and_fields(name: str) -> None:
    thing = public()[name]
    heading, text = sections()[name]
    if dataclasses.is_dataclass(thing):
        fields = {field.name for field in dataclasses.fields(thing)}
        members = fields | {member for member in dir(thing) if not member.startswith("_")}
        assert members - {field for field in fields if field.startswith("_")} == set(
            re.findall(r"`(\w+)`", text.partition("Fields:")[2])
        )
    elif heading != name:
        found = inspect.signature(thing)  # type: ignore[arg-type]
        parameters = [plain(parameter) for parameter in found.parameters.values()]
        shown = found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        assert heading == f"{name}{shown}"
    else:
        assert inspect.ismodule(thing) or (isinstance(thing, type) and issubclass(thing, Exception | enum.Enum))
