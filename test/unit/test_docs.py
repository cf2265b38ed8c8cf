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
    """Codes of the hooks, reasons from sizes, and unread marks. docs/reasons.md lists each with its sentence."""
    explained = set(re.findall(r"Reason\.([A-Z_]+)", read("torch_xla_donate/_report/explain.py")))
    explained |= {code.upper() for code in re.findall(r'return "(\w+)", ', read("torch_xla_donate/hlo/outcomes.py"))}
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


def test_every_message_of_the_code_has_a_page() -> None:
    """If the message names a page, that page has it."""
    texts = {page.stem: words(page.read_text(encoding="utf-8")) for page in PAGES}
    missing = [
        (where, text)
        for where, text, page in CASES
        if words(text) not in (" ".join(texts.values()) if page is None else texts[page])
    ]
    assert missing == []


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


def test_every_link_leads_somewhere() -> None:
    broken = []
    for page in LINKED:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            if not target.startswith(("http:", "https:")) and (
                not path.exists() or (anchor and anchor not in headings(path))
            ):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert all(f"]({page.name})" in index for page in PAGES if page.name != "README.md")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


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


def test_the_reference_gives_signatures_and_fields() -> None:
    for name, thing in public().items():
        heading, text = sections()[name]
        if dataclasses.is_dataclass(thing):
            fields = {field.name for field in dataclasses.fields(thing)}
            members = fields | {member for member in dir(thing) if not member.startswith("_")}
            shown = set(re.findall(r"`(\w+)`", text.partition("Fields:")[2]))
            assert members - {field for field in fields if field.startswith("_")} == shown, name
        elif heading != name:
            found = inspect.signature(thing)  # type: ignore[arg-type]
            parameters = [plain(parameter) for parameter in found.parameters.values()]
            assert heading == f"{name}{found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"
        else:
            assert inspect.ismodule(thing) or (isinstance(thing, type) and issubclass(thing, Exception | enum.Enum))
