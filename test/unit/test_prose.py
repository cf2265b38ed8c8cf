"""The check of our words: it finds each of them, in each kind of file, and reads all files that it covers."""

from __future__ import annotations

import re
from pathlib import Path

import prose
import pytest

# By the words to be found.
SAMPLES = {
    "is asked": "The hook is asked once.",
    "told apart": "They are told apart by their names.",
    "tells": "The report tells the reason.",
    "alone": "The graph alone holds it.",
    "nobody": "A tensor that nobody reads.",
    "by itself": "XLA shards it by itself.",
    "of its own": "It has a graph of its own.",
    "anew": "It is compiled anew.",
    "inside of": "Not inside of the loop.",
    "outside of": "A run outside of a step.",
    "is no tensor": "This leaf is no tensor.",
    "left away": "It may be left away.",
    "for good": "The mark is gone for good.",
    "all the same": "XLA copies it all the same.",
    "but for": "All of them, but for the first.",
    "as it came": "It is returned as it came.",
    "handed over": "The buffer is handed over.",
    ", and why": "It shows the outcome, and why.",
    "What": "It is over. What is left stays.",
}


def found(text: str) -> list[str]:
    return [words for _, words, _ in prose.words_in(text)]


@pytest.mark.parametrize("words", SAMPLES)
def test_each_word_is_found(words: str) -> None:
    assert found(SAMPLES[words]) == [words]
    broken = SAMPLES[words].replace(" ", "\n")
    assert found(broken) == [words]


def test_each_pattern_has_a_sample() -> None:
    patterns = [*prose.BANNED, *prose.BANNED_STARTS]
    unseen = [p for p in patterns if not any(re.search(p, words) for words in SAMPLES)]
    assert unseen == []


def test_a_single_backtick_hides_one_paragraph_at_most() -> None:
    assert found("A ` here.\n\nCompiled anew, `x`.\n- A ` there.\n- Again anew, `y`.") == ["anew", "anew"]


def test_code_and_plain_sentences_pass() -> None:
    assert found("`nobody.tell()` and ``anew``, self.tell, tell_all, tell=True, there is no other, is no longer.") == []
    assert found("What is it? A report shows what XLA did. Tensors that you donate.") == []


PAGE = """Fine.

```python
anew = 1  # anew
```

It says
anew [here](anew.md).
"""

MODULE = '''x = "anew"
y = f"It runs {x} anew."
# All
# by

# Fine
# anew.


def f():
    """Fine.

    anew
    """
    return ("Not "
        "by itself"), anew  # by
    # itself
'''

PART = """auto x = "// anew anew anew";
// Compiled by
// itself.
/* Fine,
   anew. */
int anew;  // anew
"""


@pytest.mark.parametrize(
    ("name", "source", "lines"),
    [("page.md", PAGE, [8]), ("module.py", MODULE, [2, 7, 13, 15, 16]), ("part.cpp", PART, [2, 5, 6])],
)
def test_prose_is_found_with_its_line(name: str, source: str, lines: list[int], tmp_path: Path) -> None:
    (tmp_path / name).write_text(source, encoding="utf-8")
    assert [finding.line for finding in prose.check(tmp_path / name)] == lines


def test_the_exit_code_says_whether_a_word_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Compiled anew.\n", encoding="utf-8")
    monkeypatch.setattr(prose, "files", lambda places: [page])
    assert prose.main([]) == 1
    assert capsys.readouterr().out == f"{page}:1: anew -> again\n"
    page.write_text("Compiled again.\n", encoding="utf-8")
    assert prose.main([]) == 0


def test_all_files_of_the_folders_are_read() -> None:
    for place in prose.COVERED:
        path = prose.ROOT / place
        assert path.exists(), place
        here = (
            [path]
            if path.is_file()
            else [p for p in path.rglob("*") if p.suffix in {".md", ".py", ".pyi", ".h", ".cpp"}]
        )
        assert sorted(prose.files([place])) == sorted(set(here) - prose.EXEMPT)


def test_the_words_of_this_project() -> None:
    assert [str(finding) for path in prose.files(prose.COVERED) for finding in prose.check(path)] == []
