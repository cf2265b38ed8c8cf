"""`make sanitize` says clearly if a machine lacks something."""

from __future__ import annotations

from pathlib import Path

import pytest
from sanitize import run


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Replaces the compiler: what it says of its version, and of the place of a library."""

    def replace(version: str, place: str) -> None:
        path = tmp_path / "c++"
        path.write_text(f'#!/bin/sh\ncase "$1" in\n--version) echo "{version}";;\n*) echo "{place}";;\nesac\n')
        path.chmod(0o755)
        monkeypatch.setattr(run, "COMPILER", str(path))

    return replace


GCC = "c++ 12.2.0, Free Software Foundation, Inc."


def test_a_library_that_the_compiler_does_not_know_is_named(compiler):
    compiler(GCC, "libasan.so")  # it answers with only the name
    with pytest.raises(SystemExit, match=r"has no libasan.so. Install the sanitizers of this version of GCC"):
        run.check(run.SANITIZERS["address"])


def test_another_compiler_than_gcc_is_named(compiler):
    compiler("clang version 19", __file__)
    with pytest.raises(SystemExit, match=r"is clang version 19, expected GCC: set CXX="):
        run.check(run.SANITIZERS["undefined"])


def test_a_machine_without_setarch_is_told_what_to_install(compiler, tmp_path, monkeypatch):
    compiler(GCC, __file__)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"found no setarch. Install util-linux"):
        run.check(run.SANITIZERS["thread"])


def test_a_container_that_forbids_setarch_is_told_so(compiler, tmp_path, monkeypatch):
    compiler(GCC, __file__)
    setarch = tmp_path / "setarch"
    setarch.write_text("#!/bin/sh\nexit 1\n")
    setarch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"`setarch -R true` is not permitted here"):
        run.check(run.SANITIZERS["thread"])


def test_each_suppression_has_a_reason():
    for path in Path(run.__file__).parent.glob("*.txt"):
        before = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                assert before, f"{path.name}: the line before `{line}` is empty, expected its reason"
            before = line
