"""What `make coverage` makes of the reports of coverage.py and gcovr."""

from __future__ import annotations

import json

import pytest
from line_coverage.run import BEGIN, END, Lines, cpp_lines, percentage, python_lines, ranges, with_result


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


def test_the_result_is_rounded_down_and_stands_in_its_place() -> None:
    readme = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    changed = with_result(readme, 94.99, 100.0)
    assert changed.startswith(f"before\n{BEGIN}\n") and changed.endswith(f"\n{END}\nafter\n")
    assert "94% of the Python lines and 100% of the C++ lines" in changed and "old" not in changed


def test_a_readme_without_the_comments_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 places for the result, expected 1"):
        with_result("nothing", 96.0, 96.0)
