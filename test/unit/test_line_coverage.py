"""How `make coverage` reads the reports of coverage.py and gcovr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from line_coverage import run
from line_coverage.run import (
    BEGIN,
    END,
    REASONS,
    Lines,
    cpp_lines,
    percentage,
    python_lines,
    ranges,
    reasons_to_correct,
    with_result,
)


def test_neighbours_are_joined() -> None:
    assert ranges((7, 1, 2, 3, 9, 10)) == "1-3, 7, 9-10"
    assert ranges(()) == ""


def test_the_percentage_is_of_the_lines_of_all_files() -> None:
    assert percentage([Lines("a", 90, (1, 2)), Lines("b", 8, ())]) == 98.0
    assert percentage([]) == 0.0


def test_python_lines_are_read() -> None:
    report = {"files": {"b.py": {"executed_lines": [1, 3], "missing_lines": [2]}}}
    assert python_lines(json.dumps(report)) == [Lines("b.py", 2, (2,))]


def test_a_line_of_a_template_runs_if_one_instance_does() -> None:
    counts = [(4, 0), (4, 2), (5, 0), (6, 1)]
    lines: list[dict[str, object]] = [{"line_number": number, "count": count} for number, count in counts]
    lines += [{"line_number": 7, "count": 0, "gcovr/excluded": True}]
    report = {"files": [{"file": "csrc/a.h", "lines": lines}]}
    assert cpp_lines(json.dumps(report)) == [Lines("csrc/a.h", 2, (5,))]


def test_lines_without_a_reason_and_reasons_without_lines(tmp_path: Path) -> None:
    code = "one();\ntwo();\n\nthree();\nfour();\nfive();\nsix();\nseven();\n"
    (tmp_path / "a.cpp").write_text(code, encoding="utf-8")
    page = "| `a.cpp` | `two()` | never |\n| `a.cpp` | `five()` | it runs |\n| `b.cpp` | `x()` | it is gone |\n"
    assert reasons_to_correct([Lines("a.cpp", 5, (2, 4, 8))], page, tmp_path) == [
        "a.cpp: no reason for 8",
        "a.cpp: no line with `five()` is left out",
        "b.cpp: no line with `x()` is left out",
    ]


def test_the_reasons_quote_lines_that_there_are() -> None:
    rows = re.findall(r"^\| `(csrc/[^`]+)` \| `([^`]+)` \|", REASONS.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows and [(path, piece) for path, piece in rows if piece not in (run.ROOT / path).read_text("utf-8")] == []


def test_the_result_is_rounded_down_and_stands_in_its_place() -> None:
    readme = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    changed = with_result(readme, 94.99, 100.0)
    assert changed.startswith(f"before\n{BEGIN}\n") and changed.endswith(f"\n{END}\nafter\n")
    assert "94% of the Python lines and 100% of the C++ lines" in changed and "old" not in changed


def test_a_readme_without_the_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 places for the result, expected 1"):
        with_result("nothing", 96.0, 96.0)


PROGRAM = """
    import os

    if os.fork() == 0:
        print("in a fork")
        os._exit(0)
    os.wait()
"""


def test_a_fork_that_ends_by_os_exit_is_counted(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    settings = tmp_path / "settings.toml"
    settings.write_text("[tool.coverage.run]\nparallel = true\ninclude = ['*/program.py']\n", encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("COVER")},
        "PYTHONPATH": str(Path(run.__file__).parent / "startup"),
        "COVERED_MODULE": "/not/loaded.so",
        "COVERAGE_PROCESS_START": str(settings),
        "COVERAGE_FILE": str(tmp_path / "lines"),
    }
    command = [sys.executable, "-m", "coverage"]
    for words in (
        [sys.executable, "program.py"],
        [*command, "combine", "-q"],
        [*command, "json", "-q", "-o", "report.json"],
    ):
        subprocess.run(words, cwd=tmp_path, env=environment, check=True)
    (found,) = python_lines((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert (found.path, found.run, found.missing) == ("program.py", 5, ())
