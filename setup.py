"""Builds torch_xla_donate._C by way of CMake; all metadata is in pyproject.toml."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()


class CMakeBuild(build_ext):
    """Lets CMake put the module, and the record of what it was built against, into the package."""

    def build_extension(self, ext: Extension) -> None:
        for package in ("torch", "torch_xla"):
            if importlib.util.find_spec(package) is None:
                sys.exit(
                    f"{sys.executable} has no {package}, against which torch_xla_donate is to be built. "
                    "Install torch and torch_xla (2.7 to 2.9) first, then: pip install --no-build-isolation ."
                )
        output = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        # An editable build lands in the source tree, for which `make` has a build folder already.
        build = Path(os.environ.get("TORCH_XLA_DONATE_BUILD_DIR", Path(self.build_temp).resolve()))
        build.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [
                "cmake",
                "-S",
                str(ROOT),
                "-B",
                str(build),
                "-G",
                "Ninja",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DTORCH_XLA_DONATE_OUTPUT={output}",
            ],
            check=True,
        )
        subprocess.run(["cmake", "--build", str(build)], check=True)


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
    ext_modules=[Extension("torch_xla_donate._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildWithPages},
)
