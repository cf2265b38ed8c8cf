"""Installing with pip, and what make says on a machine that lacks something."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from helpers import DONATING_PROGRAM, ROOT, console

DONATE = f"""{DONATING_PROGRAM}
import pathlib, sys
assert str(pathlib.Path(txd.__file__).resolve()).startswith(sys.argv[1]), txd.__file__
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The files that git tracks, somewhere else."""
    target = tmp_path_factory.mktemp("sources")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


@pytest.fixture
def environment(tmp_path_factory):
    """A separate environment that sees torch, torch_xla and the build tools of this one, but not this package."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    here = sysconfig.get_paths()["purelib"]
    # Only the folder: the .pth files in it, among them the one that leads to these sources, are not followed.
    (site / "host.pth").write_text(here + "\n")
    return folder, site


def run(arguments, **options):
    environment = {**os.environ, **options.pop("env", {})}
    environment.pop("PYTHONPATH", None)  # what is installed is meant, not what lies beside it
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(arguments, capture_output=True, text=True, timeout=600, env=environment, **options)


def succeed(arguments, **options):
    """What the command prints, which must end well."""
    done = run(arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("editable", [False, True], ids=["installed", "editable"])
def test_pip_installs_beside_torch_and_torch_xla(sources, environment, tmp_path, editable):
    folder, site = environment
    python = folder / "bin" / "python"
    succeed(
        [python, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index"]
        + (["--editable"] if editable else [])
        + [str(sources)],
        # One build for both ways.
        env={"TORCH_XLA_DONATE_BUILD_DIR": str(sources.parent / "shared_build")},
    )
    succeed([python, "-c", DONATE, str(sources if editable else site)], cwd=tmp_path)


def test_a_wheel_is_complete_and_runs_the_quickstart(sources, environment, tmp_path):
    # GIVEN a wheel, installed in a clean environment
    folder, site = environment
    pip = [folder / "bin" / "python", "-m", "pip"]
    succeed(
        [*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(tmp_path), str(sources)],
        env={"TORCH_XLA_DONATE_BUILD_DIR": str(sources.parent / "shared_build")},
    )
    (wheel,) = tmp_path.glob("*.whl")
    succeed([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    # THEN it has every file of the package, the stub, the marker and the module
    found = set(zipfile.ZipFile(wheel).namelist())
    files = (sources / "torch_xla_donate").rglob("*")
    kinds = (".py", ".pyi", ".typed", ".html", ".mplstyle")
    # The folder of the pytest plugin is not a package: what is in it becomes a top-level package.
    expected = {
        str(file.relative_to(sources)).removeprefix("torch_xla_donate/_pytest/")
        for file in files
        if file.suffix in kinds
    }
    assert {"torch_xla_donate/_C.pyi", "torch_xla_donate/py.typed", "torch_xla_donate/_host/load.py"} <= expected
    assert expected <= found
    assert sum(name.startswith("torch_xla_donate/_built/") and name.endswith(".so") for name in found) == 1
    # AND without the checks of `make build`
    (module,) = (site / "torch_xla_donate" / "_built").glob("*/_C*.so")
    ours = (ROOT / "torch_xla_donate" / "_built" / module.parent.name / module.name).read_bytes()
    assert b"__glibcxx_assert_fail" not in module.read_bytes() and b"__glibcxx_assert_fail" in ours
    # AND the pages that its messages name
    assert {f"torch_xla_donate/docs/{page.name}" for page in (sources / "docs").glob("*.md")} <= found
    shown = succeed([pip[0], "-m", "torch_xla_donate", "explain", "errors"], cwd=tmp_path)
    assert shown == (sources / "docs" / "errors.md").read_text(encoding="utf-8")
    # AND the README's quickstart prints there what the README says
    used = succeed([pip[0], str(sources / "examples" / "quickstart.py")], cwd=tmp_path)
    assert console("python examples/quickstart.py", used) in (sources / "README.md").read_text()
    where = succeed([pip[0], "-c", "import torch_xla_donate as txd; print(txd.__file__)"], cwd=tmp_path)
    assert where.startswith(str(site))


def preflight(*arguments, env=None, cwd=ROOT):
    return run(["bash", str(ROOT / "third_party" / "preflight.sh"), *arguments], env=env or {}, cwd=cwd)


def test_a_machine_that_has_everything_passes():
    done = preflight(sys.executable, "1", ".venv")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def old_python(tmp_path):
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\nif [ "$1" = --version ]; then echo Python 3.8.2; else exit 1; fi\n')
    path.chmod(0o755)
    return str(path)


def test_what_is_missing_is_told_in_one_line(old_python):
    for arguments, env, line in [
        (("", "1", "x"), {}, "no Python found; install Python 3.11, or name one: make PYTHON="),
        ((sys.executable, "1", "x"), {"CXX": "no-such-compiler"}, "no C++ compiler (no-such-compiler); install g++"),
        ((sys.executable, "999999", "x"), {}, "999999 GB needed for torch and its CUDA libraries"),
        ((old_python, "1", "x"), {}, "Python 3.8.2 has no torch_xla 2.9 wheel (3.10 to 3.13 have one)"),
    ]:
        done = preflight(*arguments, env=env)
        assert done.returncode == 1
        assert line in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_make_rebuilds_only_when_csrc_has_changed(sources, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    plan = run(["make", "-n", "test"], cwd=copy)
    assert "pip install" in plan.stdout
    # The environment of this checkout stands in, as made after the sources.
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    (copy / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (copy / "build").mkdir()
    plan = run(["make", "-n", "build"], cwd=copy)
    assert "pip install" not in plan.stdout
    assert "cmake --build build" in plan.stdout
