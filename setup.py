"""Builds torch_xla_donate's extension module by way of CMake; all metadata is in pyproject.toml."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
SUPPORTED = ("2.8", "2.9")
AGAIN = "then: pip install --no-build-isolation ."


def installed(package: str) -> "str | None":
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def minor(version: str) -> str:
    """'2.9' of '2.9.1+cu128'."""
    return ".".join(version.split(".")[:2])


def folder() -> str:
    """The folder of the module in the package, one for each release, from which `_host/load.py` loads it."""
    return "torch_" + "_".join(re.findall(r"\d+", installed("torch") or "0.0")[:2])


def tool(name: str) -> "str | None":
    """A program beside the interpreter, or in PATH: pip does not activate the environment that it installs into."""
    return shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))


def missing() -> "str | None":
    """What prevents the build, in one sentence."""
    torch, torch_xla = installed("torch"), installed("torch_xla")
    for package, version in (("torch", torch), ("torch_xla", torch_xla)):
        if version is None:
            return (
                f"{sys.executable} has no {package}, against which torch_xla_donate is to be built. "
                f"Install torch and torch_xla ({' or '.join(SUPPORTED)}) first, {AGAIN}"
            )
    if minor(torch_xla) not in SUPPORTED or minor(torch) != minor(torch_xla):
        return (
            f"torch_xla_donate supports torch and torch_xla {' or '.join(SUPPORTED)}, both of one release, but torch "
            f"{torch} and torch_xla {torch_xla} are installed. Install a supported release, {AGAIN}"
        )
    for name in ("cmake", "ninja"):
        if tool(name) is None:
            return f"{name} is missing, with which torch_xla_donate is built. Run: pip install {name}, {AGAIN}"
    if tool(os.environ.get("CXX") or "c++") is None and (os.environ.get("CXX") or tool("g++") is None):
        return (
            f"No C++ compiler ({os.environ.get('CXX') or 'c++ or g++'}), with which torch_xla_donate is built. "
            f"Install g++, {AGAIN}"
        )
    return None


class CMakeBuild(build_ext):
    """Lets CMake put the module, and the record of what it was built against, into the package."""

    def build_extension(self, ext: Extension) -> None:
        problem = missing()
        if problem is not None:
            sys.exit(f"error: {problem}")
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # An editable build lands in the source tree, for which `make` has a build folder already.
        build = Path(os.environ.get("TORCH_XLA_DONATE_BUILD_DIR", Path(self.build_temp).resolve()))
        build.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                tool("cmake"),
                "-S",
                str(ROOT),
                "-B",
                str(build),
                "-G",
                "Ninja",
                f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DTORCH_XLA_DONATE_OUTPUT={output}",
            ],
            check=True,
        )
        subprocess.run([tool("cmake"), "--build", str(build)], check=True)


class BuildWithPages(build_py):
    """The package carries the pages that its messages name; in a checkout they stay in docs/."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "torch_xla_donate" / "docs"
            shutil.rmtree(target, ignore_errors=True)  # pages that are no more
            target.mkdir(parents=True)
            for page in sorted((ROOT / "docs").glob("*.md")):
                shutil.copy(page, target)


setup(
    ext_modules=[Extension(f"torch_xla_donate._built.{folder()}._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildWithPages},
)
