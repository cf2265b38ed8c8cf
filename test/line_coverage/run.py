"""Runs the tests of `make test` and shows which of our lines they run, in Python and in C++.

    python test/line_coverage/run.py [arguments of pytest]

`make coverage` calls it with the module that it builds in build-coverage/. Without arguments the result goes into the
README. The exit code is 1 if a test fails, or if less than 95% of the lines of either language run. uncovered.md says
of which kinds the C++ lines are that do not run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build-coverage"
NEEDED = 95.0
# No statements: a closing brace, the head of a lambda, and the documented arguments of a binding. GCC counts there what
# would destroy the objects of the statement around them, had that thrown.
NO_STATEMENT = r"\s*(\},?|\[[^][]*\][^{}]*[{,]|py::arg\(.*)\s*$"
BEGIN, END = "<!-- coverage -->", "<!-- end of coverage -->"


@dataclass(frozen=True)
class Lines:
    """The lines of one file."""

    path: str
    run: int
    missing: tuple[int, ...]

    def __str__(self) -> str:
        total = self.run + len(self.missing)
        return f"{self.path:<42} {self.run:>5} of {total:>5}  {ranges(self.missing)}"


def ranges(numbers: tuple[int, ...]) -> str:
    """Line numbers as text: neighbours are joined."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def percentage(files: list[Lines]) -> float:
    """Of the lines of all files, how many run."""
    run = sum(one.run for one in files)
    total = run + sum(len(one.missing) for one in files)
    return 100.0 * run / total if total else 0.0


def python_lines(report: str) -> list[Lines]:
    """The files of coverage.py's report in JSON."""
    files = json.loads(report)["files"]
    return [
        Lines(path, len(found["executed_lines"]), tuple(found["missing_lines"]))
        for path, found in sorted(files.items())
    ]


def cpp_lines(report: str) -> list[Lines]:
    """The files of gcovr's report in JSON. A line may be there once for each instance of a template."""
    files = []
    for found in sorted(json.loads(report)["files"], key=lambda one: str(one["file"])):
        counts: dict[int, int] = {}
        for line in found["lines"]:
            if not line.get("gcovr/noncode") and not line.get("gcovr/excluded"):
                number = line["line_number"]
                counts[number] = counts.get(number, 0) + line["count"]
        missing = tuple(number for number, count in counts.items() if not count)
        files.append(Lines(found["file"], len(counts) - len(missing), missing))
    return files


def with_result(readme: str, python: float, cpp: float) -> str:
    """The README with the result between its two comments. Rounded down, so that 94.9% is not 95%."""
    text = f"The tests run {int(python)}% of the Python lines and {int(cpp)}% of the C++ lines (`make coverage`)."
    found, count = re.subn(f"{BEGIN}\n.*?{END}", f"{BEGIN}\n{text}\n{END}", readme, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"found {count} places for the result, expected 1: {BEGIN} and {END} on separate lines")
    return found


def run_tests(arguments: list[str]) -> bool:
    """Runs ctest and pytest with fresh counters; True if all tests pass."""
    for counters in BUILD.rglob("*.gcda"):
        counters.unlink()
    shutil.rmtree(BUILD / "python", ignore_errors=True)
    (BUILD / "python").mkdir()
    (module,) = (BUILD / "module").glob("_C*.so")
    environment = {
        **os.environ,
        "COVERED_MODULE": str(module),
        "COVERAGE_FILE": str(BUILD / "python/lines"),
        "COVERAGE_PROCESS_START": str(ROOT / "pyproject.toml"),
        "PYTHONPATH": f"{ROOT / 'test/line_coverage/startup'}:{ROOT}",
    }
    ctest = ["ctest", "--test-dir", str(BUILD), "--output-on-failure", "--no-tests=error", "--quiet"]
    pytest = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", "-m", "not nightly"]
    commands = [ctest, [*pytest, *arguments]]
    codes = [subprocess.run(command, cwd=ROOT, env=environment).returncode for command in commands]
    return codes == [0, 0]


def measured() -> tuple[list[Lines], list[Lines]]:
    """The lines of Python and of C++."""
    python, cpp = BUILD / "python.json", BUILD / "cpp.json"
    command = [sys.executable, "-m", "coverage"]
    environment = {**os.environ, "COVERAGE_FILE": str(BUILD / "python/lines")}
    # Tests import copies of the package, too, which are gone by now.
    ours = f"--include={ROOT}/torch_xla_donate/*"
    for words in (["combine", "-q"], ["json", "-q", ours, "-o", str(python)]):
        subprocess.run([*command, *words], cwd=ROOT, env=environment, check=True)
    gcovr = [sys.executable, "-m", "gcovr", "--root", str(ROOT), "--filter", "csrc/", "--json", str(cpp)]
    gcovr.append(f"--exclude-lines-by-pattern={NO_STATEMENT}")
    # A header's function may have another line in each file, as a lambda has.
    subprocess.run([*gcovr, "--merge-mode-functions=separate", str(BUILD)], cwd=ROOT, check=True)
    return python_lines(python.read_text()), cpp_lines(cpp.read_text())


def main(arguments: list[str]) -> int:
    passed = run_tests(arguments)
    python, cpp = measured()
    print("\nlines of each file that run, and the numbers of those that do not")
    for one in (*python, *cpp):
        if one.missing:
            print(one)
    shares = percentage(python), percentage(cpp)
    print(f"Python {shares[0]:.2f}%, C++ {shares[1]:.2f}%, needed {NEEDED:.0f}%")
    if not passed:
        print("a test failed: the README stays as it is")
    elif not arguments:
        readme = ROOT / "README.md"
        readme.write_text(with_result(readme.read_text(encoding="utf-8"), *shares), encoding="utf-8")
    return 0 if passed and min(shares) >= NEEDED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
