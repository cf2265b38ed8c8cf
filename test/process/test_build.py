"""What a build from the sources says when something is missing: one sentence, before CMake starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = {"torch": "2.9.1", "torch_xla": "2.9.0"}
TOOLS = ("cmake", "ninja", "c++")
FIRST = "Install torch and torch_xla (2.8 or 2.9) first, then: pip install --no-build-isolation ."


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has setuptools only."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for name in ("setuptools", "_distutils_hack", "pkg_resources"):
        found = Path(sysconfig.get_paths()["purelib"]) / name
        if found.exists():
            (site / name).symlink_to(found)
    return folder


def build(environment: Path, folder: Path, packages: dict[str, str], tools: tuple[str, ...]) -> str:
    """What the build prints to stderr where only these tools and the metadata of these packages are found."""
    copy, found, metadata = folder / "sources", folder / "bin", folder / "metadata"
    (copy / "torch_xla_donate").mkdir(parents=True)
    found.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "torch_xla_donate/__init__.py"):
        shutil.copy(ROOT / name, copy / name)
    for tool in tools:
        (found / tool).write_text("#!/bin/sh\necho started $0\nexit 1\n")
        (found / tool).chmod(0o755)
    for name, version in packages.items():
        record = metadata / f"{name}-{version}.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    settings = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    done = subprocess.run(
        [environment / "bin" / "python", "setup.py", "-q", "build_ext"],
        cwd=copy,
        env={**settings, "PATH": str(found), "PYTHONPATH": str(metadata)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0, done.stdout
    if tools == TOOLS and packages == SUPPORTED:
        return done.stdout
    assert "started" not in done.stdout
    return done.stderr


@pytest.mark.parametrize(
    ("packages", "tools", "sentence"),
    [
        ({}, TOOLS, f"has no torch, against which torch_xla_donate is to be built. {FIRST}"),
        ({"torch": "2.9.1"}, TOOLS, f"has no torch_xla, against which torch_xla_donate is to be built. {FIRST}"),
        (
            {"torch": "2.7.1", "torch_xla": "2.7.0"},
            TOOLS,
            "supports torch and torch_xla 2.8 or 2.9, both of one release, but torch 2.7.1 and torch_xla 2.7.0 are",
        ),
        ({"torch": "2.8.0", "torch_xla": "2.9.0"}, TOOLS, "but torch 2.8.0 and torch_xla 2.9.0 are installed"),
        (SUPPORTED, ("ninja", "c++"), "cmake is missing, with which torch_xla_donate is built. Run: pip install cmake"),
        (SUPPORTED, ("cmake", "c++"), "ninja is missing, with which torch_xla_donate is built. Run: pip install ninja"),
        (SUPPORTED, ("cmake", "ninja"), "No C++ compiler (c++ or g++), with which torch_xla_donate is built. Install"),
    ],
    ids=["torch", "torch_xla", "release", "two-releases", "cmake", "ninja", "compiler"],
)
def test_what_a_build_lacks_is_told_in_one_sentence(
    environment: Path, tmp_path: Path, packages: dict[str, str], tools: tuple[str, ...], sentence: str
) -> None:
    told = [line for line in build(environment, tmp_path, packages, tools).splitlines() if "error: " in line]
    assert len(told) == 1
    assert sentence in told[0]


def test_a_build_that_lacks_nothing_starts_cmake(environment: Path, tmp_path: Path) -> None:
    assert "started" in build(environment, tmp_path, SUPPORTED, TOOLS)
