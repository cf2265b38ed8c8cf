"""The measured numbers of README and docs are those of the result files in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import click
import pytest
from helpers import ROOT, import_from

# matplotlib, which the model of Llama's memory draws with, imports pyparsing by names that the latter has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def write_docs() -> ModuleType:
    return import_from("benchmarks", "write_docs")


def test_pages_have_the_numbers_of_the_result_files(write_docs: ModuleType) -> None:
    found = write_docs.blocks()
    shown = 0
    for page in write_docs.PAGES:
        text = page.read_text(encoding="utf-8")
        assert write_docs.written(text, found) == text, f"{page.name}: run `python benchmarks/write_docs.py`"
        blocks = len(write_docs.BLOCK.findall(text))
        assert text.count("<!-- benchmarks: ") == blocks, f"{page.name}: a block without an end, or a name on its own"
        shown += blocks
    assert shown >= 15


def test_other_numbers_in_a_block_are_replaced(write_docs: ModuleType) -> None:
    text = "a\n<!-- benchmarks: soak all -->\n| 1 |\n<!-- end -->\nb\n"
    assert write_docs.written(text, {"soak all": "| 2 |\n"}) == text.replace("1", "2")


@pytest.mark.parametrize("name", ["soak speed", "speed all"])
def test_block_that_no_result_has_is_an_error(write_docs: ModuleType, name: str) -> None:
    with pytest.raises(click.ClickException, match=f"no result has the block '{name}'; there are soak all"):
        write_docs.written(f"<!-- benchmarks: {name} -->\n<!-- end -->", {"soak all": ""})


def test_block_of_a_benchmark_that_was_not_run_says_so(write_docs: ModuleType) -> None:
    page = write_docs.written("<!-- benchmarks: soak all -->\n| 1 |\n<!-- end -->", {"demo steps": ""})
    assert "Not measured yet: `python benchmarks/soak.py`." in page and "| 1 |" not in page


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.stem)
def test_committed_result_says_when_and_on_what_it_was_measured(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["benchmark"] == path.stem
    assert found.keys() >= {"date", "commit", "command", "options", "cpu", "cores", "versions"}
    assert found["versions"].keys() >= {"torch_xla_donate", "torch", "torch_xla", "python"}
    # Nothing is made up: what a result lacks is null, and a note says why.
    assert "note" in found or None not in (found["commit"], found["cpu"])
    assert not found["options"].get("tiny", False)
    assert str(Path.home()) not in json.dumps(found) and str(BENCHMARKS.parent) not in json.dumps(found)


@pytest.mark.parametrize("commits", [{}, {"soak": None}, {"soak": "abc", "demo": "abc+"}])
def test_results_of_other_commits_are_refused(
    commits: dict[str, str | None], write_docs: ModuleType, tmp_path: Path
) -> None:
    for name, commit in commits.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": commit}), encoding="utf-8")
    with pytest.raises(click.ClickException, match="not measured on commit abc: "):
        write_docs.refuse_old_results(tmp_path, "abc")
    for name in commits or ["soak"]:
        (tmp_path / f"{name}.json").write_text(json.dumps({"commit": "abc"}), encoding="utf-8")
    write_docs.refuse_old_results(tmp_path, "abc")
