"""The documentation says what the code does, its links lead somewhere, and the workflows of CI run real commands."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
from pathlib import Path

import messages
import support
import torch_xla

import torch_xla_donate
from torch_xla_donate import _C, _host, _pages
from torch_xla_donate._host import hooks
from torch_xla_donate._report import reasons

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LINKED = [*ROOT.glob("*.md"), *PAGES, *(ROOT / "third_party").glob("*.md"), *(ROOT / "test").rglob("*.md")]


def words(text: str) -> str:
    """The text with its line breaks and runs of blanks made one blank: pages break lines where they like."""
    return " ".join(text.split())


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


# --- The README ---


def test_the_readme_names_the_versions_that_are_supported() -> None:
    assert f"torch_xla {_host.load.supported_versions()}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_releases_is_that_of_the_result_files() -> None:
    assert support.BLOCK.findall(read("docs/safety.md")) == [support.table()], "run `python test/support.py`"


# --- Every message has its passage ---


def test_each_message_of_the_code_is_in_the_section_that_it_names() -> None:
    """A message that names none is on the page of errors."""
    written = messages.written()
    assert len(written) >= 150
    assert len({message.word for message in written}) >= 15
    missing = [message for message in written if message.text not in words(_pages.text(message.word or "errors"))]
    assert missing == []


def test_each_word_of_a_message_and_each_old_name_of_a_page_leads_to_a_section() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "torch_xla_donate").rglob("*.py"))
    code += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "csrc").rglob("*.cpp"))
    named = set(re.findall(r"""\bsee\(["'](\w+)["']\)|explain ([a-z]\w+)`""", code))
    for word in {first or second for first, second in named} | _pages.WORDS.keys():
        assert _pages.text(word).startswith("#"), word
    assert not _pages.WORDS.keys() & _pages.titles().keys()


def test_every_code_of_the_hooks_has_a_sentence() -> None:
    assert _C.reason_codes() == ["none", *(reason for reason in reasons.Reason if reason.sentence)]


def test_the_reasons_are_a_closed_set() -> None:
    """Codes of the hooks, reasons from sizes, and unread marks. docs/errors.md lists each with its sentence."""
    explained = set(re.findall(r"Reason\.([A-Z_]+)", read("torch_xla_donate/_report/explain.py")))
    explained |= {code.upper() for code in re.findall(r'return "(\w+)", ', read("torch_xla_donate/hlo/outcomes.py"))}
    hooks = {reason.name for reason in reasons.Reason if reason.sentence}
    assert {reason.name for reason in reasons.Reason} == explained | hooks | {"UNREAD"}
    assert not explained & hooks
    rows = dict(re.findall(r"^\| `Reason\.(\w+)` \| `(.+?)` \|", read("docs/errors.md"), re.MULTILINE))
    assert list(rows) == [reason.name for reason in reasons.Reason]
    for reason in reasons.Reason:
        assert reason.name not in hooks or rows[reason.name] == reason.sentence.replace("{details}", "..."), reason


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


def test_the_record_names_the_probe_of_the_layouts() -> None:
    probe, _ = hooks._probe(torch_xla.device())
    record = words((ROOT / "third_party" / "host_facts.md").read_text(encoding="utf-8"))
    assert f"a fresh {str(probe.dtype).removeprefix('torch.')}[{probe.numel()}] with known values" in record


# --- Tables, links, pictures ---


def test_the_table_of_hooks_is_the_table_of_the_code() -> None:
    rows = re.findall(r"^\| `([\w:]+)` \| (.+) \|$", read("docs/internals.md"), re.MULTILINE)
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
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = [_pages.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    assert len(found) == len(set(found)), page
    return set(found)


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


def test_every_page_is_in_the_index_and_in_the_site() -> None:
    index, site = read("docs/README.md"), read("docs/site/mkdocs.yml")
    for page in PAGES:
        assert page.name == "README.md" or f"]({page.name})" in index
        assert f"      - {page.name}\n" in site


def test_every_picture_is_shown() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *PAGES])
    for picture in (ROOT / "docs").iterdir():
        assert picture.suffix not in (".svg", ".png") or f"{picture.name})" in shown, picture.name


# --- The reference ---


def rows() -> dict[str, tuple[str, str]]:
    """For each name of the reference, its heading and the rest of its row."""
    found = re.findall(
        r"^\| `(.+?)` \| (.*) \|$", read("docs/reference.md").partition("## Environment")[0], re.MULTILINE
    )
    return {heading.partition("(")[0]: (heading, text) for heading, text in found}


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
    assert public().keys() <= rows().keys()
    assert {name for name in rows() if "." in name} <= public().keys()


def test_the_reference_gives_signatures_and_fields() -> None:
    for name, thing in public().items():
        heading, text = rows()[name]
        if dataclasses.is_dataclass(thing) and heading == name:
            fields = {field.name for field in dataclasses.fields(thing)}
            members = fields | {member for member in dir(thing) if not member.startswith("_")}
            shown = set(re.findall(r"`(\w+)`", text))
            assert members - {field for field in fields if field.startswith("_")} == shown, name
        elif heading != name:
            found = inspect.signature(thing)  # type: ignore[arg-type]
            parameters = [plain(parameter) for parameter in found.parameters.values()]
            assert heading == f"{name}{found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)}"
        else:
            assert inspect.ismodule(thing) or (isinstance(thing, type) and issubclass(thing, Exception | enum.Enum))


WORKFLOWS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / ".github" / "workflows").glob("*.yml")}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_each_target_of_a_workflow_is_one_of_make() -> None:
    targets = {name for text in WORKFLOWS.values() for name in re.findall(r"run: make ([a-z-]+)", text)}
    targets |= set(re.search(r"target: \[(.+)\]", WORKFLOWS["nightly"])[1].split(", "))  # type: ignore[index]
    assert targets >= {"lint", "test", "wheel", "docs", "test-nightly", "test-upstream", "soak", "fuzz"}
    assert {name for name in targets if not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE)} == set()


def test_the_workflows_test_each_release() -> None:
    releases = re.search(r"^RELEASES\s*:= (.+)$", MAKEFILE, re.MULTILINE)[1].split()  # type: ignore[index]
    matrices = [row.split(", ") for text in WORKFLOWS.values() for row in re.findall(r"torch-xla: \[(.+)\]", text)]
    assert len(matrices) == 2 and all(row == releases for row in matrices)
    used = {version for text in WORKFLOWS.values() for version in re.findall(r"torch-xla: (\d\S*)", text)}
    assert used and used <= set(releases)
