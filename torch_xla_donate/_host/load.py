"""Checks the versions of torch and torch_xla, and loads the extension module that was built for them.

A wheel has one module for each supported release, in `_built/torch_2_9` and so on. A module of another release can
crash the process, so nothing but the fitting one is ever loaded.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.metadata
import re
import sys
from pathlib import Path
from typing import Any

import torch

SUPPORTED = ((2, 8), (2, 9))
_PACKAGE = Path(__file__).parents[1]
_REBUILD = (
    "Rebuild torch_xla_donate in this environment: pip install --no-build-isolation --force-reinstall --no-deps ."
)


def _minor(package: str, version: str) -> tuple[int, int]:
    """(2, 9) of '2.9.1+cu128', '2.9.0.dev20250901' and '2.9rc1'. Raises ImportError for a version without numbers."""
    found = re.match(r"(\d+)\.(\d+)", str(version))  # None if the metadata has no version
    if found is None:
        raise ImportError(
            f"{package} says that its version is {version!r}, expected one such as '2.9.1'. Install a stock wheel of "
            f"torch_xla {supported_versions()}, and the torch of the same minor version."
        )
    return int(found[1]), int(found[2])


def supported_versions() -> str:
    return " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


@dataclasses.dataclass(frozen=True)
class Build:
    """The versions that the extension module was built against."""

    torch: str
    torch_xla: str
    compiler: str


def build_record(module: Path) -> Build:
    """Reads the record from the module's file without loading it, since a module of another torch may not load.

    Raises ImportError if the file has no record.
    """
    pattern = rb"torch_xla_donate build: torch=([^;]+);torch_xla=([^;]+);compiler=([^\0]+)"
    found = re.search(pattern, module.read_bytes())
    if found is None:
        raise ImportError(f"{module} has no record of its build. {_REBUILD}")
    return Build(*(group.decode() for group in found.groups()))


def built_modules() -> dict[tuple[int, int], Path]:
    """The package's modules for the running Python, by the release in the name of the folder."""
    found = _PACKAGE.glob(f"_built/torch_*_*/_C{importlib.machinery.EXTENSION_SUFFIXES[0]}")
    return {tuple(map(int, file.parent.name.split("_")[1:])): file for file in sorted(found)}  # type: ignore[misc]


def module_for(torch_version: str, torch_xla_version: str) -> Path:
    """The file of the module for these versions.

    Args:
        torch_version: version of the running torch, such as ``2.9.1+cu128``.
        torch_xla_version: version of the installed torch_xla.

    Raises ImportError if they are not supported, do not belong together, or the package has no module for them.
    """
    release, other = _minor("torch_xla", torch_xla_version), _minor("torch", torch_version)
    installed = f"torch {torch_version} and torch_xla {torch_xla_version} are installed"
    if release not in SUPPORTED:
        raise ImportError(
            f"torch_xla_donate supports torch_xla {supported_versions()}, but {installed}. Install a supported version."
        )
    if release != other:
        raise ImportError(
            f"torch {torch_version} and torch_xla {torch_xla_version} do not belong together. "
            "Install the same minor version of both."
        )
    modules = built_modules()
    if not modules:
        raise ImportError(f"torch_xla_donate has not been built. {_REBUILD}")
    if release not in modules:
        has = ", ".join(f"{major}.{minor}" for major, minor in modules)
        raise ImportError(f"torch_xla_donate has modules for torch and torch_xla {has}, but {installed}. {_REBUILD}")
    return modules[release]


def check_build(built: Build, torch_version: str, torch_xla_version: str) -> None:
    """Raises ImportError unless a module's record fits the versions: its folder may have been filled by hand."""
    if _minor("torch", built.torch) != _minor("torch", torch_version) or (
        _minor("torch_xla", built.torch_xla) != _minor("torch_xla", torch_xla_version)
    ):
        raise ImportError(
            f"torch_xla_donate was built against torch {built.torch} and torch_xla {built.torch_xla}, "
            f"but torch {torch_version} and torch_xla {torch_xla_version} are installed. {_REBUILD}"
        )


def build() -> Build:
    """The record of the module for the installed torch and torch_xla. Raises ImportError if there is none."""
    return build_record(module_for(torch.__version__, importlib.metadata.version("torch_xla")))


def load() -> None:
    """Checks versions and loads the extension module. Raises ImportError if a version does not fit."""
    try:
        torch_xla_version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"torch_xla_donate needs torch_xla {supported_versions()}, which is not installed for {sys.executable}. "
            "Install one of these versions."
        ) from error
    module = module_for(torch.__version__, torch_xla_version)
    check_build(build_record(module), torch.__version__, torch_xla_version)

    import torch_xla  # noqa: F401  (hooks need the loaded module)

    import torch_xla_donate

    torch_xla_donate.__path__.insert(0, str(module.parent))  # first: the folder of the package may hold an old module
    from torch_xla_donate import _C  # noqa: F401


def xlac() -> Any:
    """torch_xla's extension module."""
    import _XLAC

    return _XLAC
