"""Builds the extension module with GCC's sanitizers and runs it: python test/sanitize/run.py [SANITIZER ...].

`make sanitize` calls it. Each sanitizer has a build and a copy of the package in build-sanitize/, so the module in the
package stays as it is. torch and torch_xla have no instrumentation. The exit code is 1 if a command fails, also if the
sanitizer has found something in it. Nothing is suppressed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build-sanitize"
TOOLS = Path(sys.executable).parent  # cmake, ctest and ninja
COMPILER = os.environ.get("CXX", "c++")
FOUR_DEVICES = {"CPU_NUM_DEVICES": "4", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@dataclass(frozen=True)
class Sanitizer:
    flags: str
    libraries: Sequence[str] = ()  # Python loads them before all others
    options: str = ""  # the name of the variable with the sanitizer's options, and the options
    environment: dict[str, str] = field(default_factory=dict)
    prefix: Sequence[str] = ()  # of each command


SANITIZERS = {
    # Python's small objects and torch's memory are on the checked heap, too. libstdc++ is loaded early, because the
    # interpreter has no exceptions, and libasan looks for the function that throws when it starts. Leaks are not
    # looked for: Python, torch and XLA keep thousands of objects until the process ends.
    "address": Sanitizer(
        "-fsanitize=address",
        ("libasan.so", "libstdc++.so.6"),
        "ASAN_OPTIONS=detect_leaks=0:strict_init_order=1:check_initialization_order=1",
        {"PYTHONMALLOC": "malloc"},
    ),
    # A trap needs no library. No vptr: it needs the type information of torch_xla's classes, which is hidden.
    "undefined": Sanitizer("-fsanitize=undefined -fno-sanitize=vptr -fsanitize-undefined-trap-on-error"),
    # Without instrumentation, it knows only the locks of pthread, and not those of XLA. libtsan does not find its place
    # in memory if the kernel has put the program there at random. A forked process ends without its parent's threads,
    # which is not a leak.
    "thread": Sanitizer(
        "-fsanitize=thread",
        ("libtsan.so",),
        "TSAN_OPTIONS=ignore_noninstrumented_modules=1:report_thread_leaks=0",
        prefix=("setarch", "-R"),
    ),
}

PYTHON = (sys.executable,)
PYTEST = (*PYTHON, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal")
COMMANDS: dict[str, tuple[Sequence[str], dict[str, str]]] = {
    "ctest": ((str(TOOLS / "ctest"), "--test-dir", "{build}", "--output-on-failure", "--no-tests=error"), {}),
    "threads": ((*PYTHON, "-m", "sanitize.threads"), {}),
    "launch": ((*PYTHON, "-m", "sanitize.launch"), FOUR_DEVICES),
    # All tests that start no process.
    "step": ((*PYTEST, "-c", str(ROOT / "pyproject.toml"), str(ROOT / "test/step"), "-m", "step"), {}),
    "fuzz": ((*PYTHON, "-m", "fuzz.run", "--programs", "400"), {}),
}


def fail(message: str) -> None:
    sys.exit(f"make sanitize: {message}")


def library(name: str) -> str:
    """The path of a library of the compiler."""
    path = subprocess.run([COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    found = Path(path.strip())
    if not found.is_absolute() or not found.exists():  # only its name: the compiler does not know it
        fail(f"{COMPILER} has no {name}. Install the sanitizers of this version of GCC, or set CXX to a GCC with them.")
    return str(found.resolve())


def check(sanitizer: Sanitizer) -> None:
    """Ends the program with a message if the machine lacks something."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    if "Free Software Foundation" not in version:
        fail(f"{COMPILER} is {version.splitlines()[0]}, expected GCC: set CXX=g++")
    for name in sanitizer.libraries:
        library(name)
    if sanitizer.prefix:
        if shutil.which(sanitizer.prefix[0]) is None:
            fail(f"found no {sanitizer.prefix[0]}. Install util-linux.")
        if subprocess.run([*sanitizer.prefix, "true"]).returncode != 0:
            fail(f"`{' '.join(sanitizer.prefix)} true` is not permitted here. Allow personality(2) in this container.")


def build(name: str, sanitizer: Sanitizer) -> Path:
    """Builds the module and the C++ tests; copies the package. Returns the folder of the copy."""
    folder = BUILD / name
    configure = (
        *(TOOLS / "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}"),
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DTORCH_XLA_DONATE_OUTPUT={folder / 'module'}",
        *("-DTORCH_XLA_DONATE_ASSERTIONS=ON", "-DTORCH_XLA_DONATE_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=None"),
        # NDEBUG, as torch has it: the assertions of its headers are for builds of torch that have them, too.
        f"-DCMAKE_CXX_FLAGS=-O1 -g -DNDEBUG -fno-omit-frame-pointer {sanitizer.flags}",
    )
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run((TOOLS / "cmake", "--build", folder), check=True)
    copy = folder / "python"
    shutil.rmtree(copy, ignore_errors=True)
    others = shutil.ignore_patterns("_built", "__pycache__")
    shutil.copytree(ROOT / "torch_xla_donate", copy / "torch_xla_donate", ignore=others)
    (module,) = (folder / "module").glob("_C*.so")
    release = "_".join(importlib.metadata.version("torch").split(".")[:2])
    built = copy / "torch_xla_donate" / "_built" / f"torch_{release}"
    built.mkdir(parents=True)
    shutil.copy(module, built)
    return copy


def run(name: str, sanitizer: Sanitizer, command: str, copy: Path) -> bool:
    """Runs a command in the copy of the package; whether it ended well, and no process of it wrote a report."""
    words, environment = COMMANDS[command]
    words = [word.replace("{build}", str(BUILD / name)) for word in words]
    print(f"--- {name}: {command}", flush=True)
    path = [copy, copy / "torch_xla_donate/_pytest", ROOT / "test"]
    settings = {"PJRT_DEVICE": "CPU", "PYTHONPATH": os.pathsep.join(map(str, path)), **sanitizer.environment}
    reports = BUILD / name / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    if sanitizer.options:
        variable, options = sanitizer.options.split("=", 1)
        settings[variable] = f"{options}:log_path={reports / command}"
    prefix = [*sanitizer.prefix]
    if words[0] == sys.executable and sanitizer.libraries:
        prefix += ["env", f"LD_PRELOAD={' '.join(map(library, sanitizer.libraries))}"]
    # `python -m` imports from the working folder first.
    done = subprocess.run([*prefix, *words], cwd=copy, env={**os.environ, **settings, **environment})
    found = sorted(reports.iterdir())  # one file for each process
    for report in found:
        print(report.read_text(encoding="utf-8", errors="replace"))
    print(f"--- {name}: {command} ended with {done.returncode} and {len(found)} reports", flush=True)
    return done.returncode == 0 and not found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join(SANITIZERS)
    parser.add_argument("sanitizers", nargs="*", metavar="SANITIZER", help=f"of {names}; all by default")
    parser.add_argument("--only", action="append", choices=COMMANDS, help="this command; all by default")
    arguments = parser.parse_args()
    chosen = {name: SANITIZERS[name] for name in arguments.sanitizers or SANITIZERS}
    for sanitizer in chosen.values():
        check(sanitizer)
    failed = []
    for name, sanitizer in chosen.items():
        copy = build(name, sanitizer)
        failed += [
            f"{name} {command}" for command in arguments.only or COMMANDS if not run(name, sanitizer, command, copy)
        ]
    print(f"failed: {', '.join(failed)}" if failed else "no sanitizer has found anything")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
