"""Finds words that our prose does not use, and prints what to write instead.

    python test/prose.py [FILE or FOLDER ...]

It reads Markdown outside code, the comments, docstrings and other strings of Python, and the comments of C++. Code in
backticks is exempt. Without arguments it reads `COVERED`, as `make lint` does. The exit code is 1 if it finds a word.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# All folders with prose.
COVERED = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    "benchmarks",
    "csrc",
    "docs",
    "examples",
    "setup.py",
    "test",
    "third_party",
    "torch_xla_donate",
]
EXEMPT = {ROOT / "test/prose.py", ROOT / "test/unit/test_prose.py"}  # they list the words

# A pattern, and what to write instead. A blank in a pattern matches any blanks, also a line break.
BANNED = {
    r"(?:is|are|was|were|be|been|being) (?:asked|let)": "name the actor: `A calls B`",
    r"tells? apart|told apart": "distinguish",
    r"tell|tells|telling|told": "report, warn, raise, show",
    r"alone": "only",
    r"nobody|somebody|everybody|whoever|nobody's|somebody's": "name the holder or the caller",
    r"by (?:itself|themselves)": "automatically",
    r"(?:of|on) (?:its|his|their|our|one's) own": "separate, its",
    r"anew": "again",
    r"inside of": "inside",
    r"outside of": "outside",
    r"(?<!there\s)(?:is|are|was|were) no (?!longer|more|later|less)\w+": "is not a",
    r"(?:leave|leaves|left|leaving) away": "omit",
    r"for good": "permanently",
    r"all the same": "anyway",
    r"but for": "except",
    r"as it (?:came|comes)|as they (?:came|come)": "unchanged",
    r"hand(?:ed|s)? over": "pass, give",
    r", and (?:why|told|why not)(?=[.;:]|$)": "a sentence of its own that names the actor",
}
# At the start of a sentence.
BANNED_STARTS = {
    r"What|Whatever|Whoever|Who|Where|Wherever|That which": "begin with the actor or the noun; `If` for `Where`",
}


class Finding(NamedTuple):
    path: Path
    line: int
    words: str
    better: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if self.path.is_relative_to(ROOT) else self.path
        return f"{path}:{self.line}: {self.words} -> {self.better}"


def _blanks(pattern: str) -> str:
    return pattern.replace(" ", r"\s+")


_WORDS = [
    (re.compile(rf"(?<![\w.-](?=\w))(?:{_blanks(pattern)})(?![\w(=]|-\w)", re.IGNORECASE), better)
    for pattern, better in BANNED.items()
]
_STARTS = [
    (re.compile(rf"(?:\A[\s(*]*|(?<=[.!?:])\s+|\n\s*\n\s*|\n\s*[-*|] |\| )({_blanks(pattern)})\b"), better)
    for pattern, better in BANNED_STARTS.items()
]


def _hide(text: str, pattern: str, flags: int = 0) -> str:
    """Replaces what matches by a code word of as many lines."""
    return re.sub(pattern, lambda found: "`" + "\n" * found[0].count("\n") + "`", text, flags=flags)


def words_in(text: str) -> Iterator[tuple[int, str, str]]:
    """The banned words of a text outside backticks: the offset of the line, the words, the replacement."""
    text = _hide(text, r"(`+)(?!`)(?:(?!\n\s*(?:\n|[-*|] )).)+?(?<!`)\1(?!`)", re.DOTALL)
    taken: list[range] = []
    for pattern, better in _WORDS:
        for found in pattern.finditer(text):
            if not any(found.start() in span for span in taken):
                taken.append(range(*found.span()))
                yield text.count("\n", 0, found.start()), " ".join(found[0].split()), better
    for pattern, better in _STARTS:
        for found in pattern.finditer(text):
            sentence = re.split(r"[.!?](?:\s|$)", text[found.start(1) :], maxsplit=1)[0]
            if not text[found.start(1) + len(sentence) :].startswith("?"):
                yield text.count("\n", 0, found.start(1)), " ".join(found[1].split()), better


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    source = _hide(source, r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    source = _hide(source, r"<!--.*?-->", re.DOTALL)
    yield 1, _hide(source, r"\]\([^)]*\)")


def _comments(lines: dict[int, str]) -> Iterator[tuple[int, str]]:
    """Comments on successive lines are one text."""
    first, block = 0, []
    for line in sorted(lines):
        if line != first + len(block):
            yield first, "\n".join(block)
            first, block = line, []
        block.append(lines[line])
    yield first, "\n".join(block)


def _python(source: str) -> Iterator[tuple[int, str]]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    yield from _comments({line: text for line, text in comments.items() if not text.startswith(("type:", "noqa"))})
    parsed = ast.parse(source)
    inside = {id(part) for node in ast.walk(parsed) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(parsed):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "`x`" for part in node.values]
            yield node.lineno, "".join(map(str, parts))
            inside.discard(id(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            if len(node.value.split()) > 2 or "\n" in node.value:  # shorter ones are names, keys and options
                yield node.lineno, node.value


def _cpp(source: str) -> Iterator[tuple[int, str]]:
    source = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', source)
    source = re.sub(r"/\*(.*?)\*/", lambda found: "// " + found[1].replace("\n", "\n// "), source, flags=re.DOTALL)
    found = {number: line.partition("//")[2] for number, line in enumerate(source.split("\n"), 1) if "//" in line}
    yield from _comments({line: text.lstrip("/ ") for line, text in found.items()})


READERS = {".md": _markdown, ".py": _python, ".pyi": _python, ".h": _cpp, ".cpp": _cpp}


def check(path: Path) -> list[Finding]:
    """What a file has of the banned words."""
    source = path.read_text(encoding="utf-8")
    found = {
        Finding(path, first + offset, words, better)
        for first, text in READERS[path.suffix](source)
        for offset, words, better in words_in(text)
    }
    return sorted(found)


def files(places: list[str]) -> list[Path]:
    """The files of these places that git knows and that have prose."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *places],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = [ROOT / name for name in listed.split("\0") if Path(name).suffix in READERS]
    return [path for path in found if path.is_file() and path not in EXEMPT]


def main(places: list[str]) -> int:
    found = [finding for path in files(places or COVERED) for finding in check(path)]
    print("".join(f"{finding}\n" for finding in found), end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
