"""The one Python module that touches torch_xla's internals; the C++ side's is csrc/torch_xla_abi.cpp.

Loading happens in two stages, because a probe tensor would start the XLA runtime, which must not happen at import
(``torch_xla.launch`` and ``xr.use_spmd`` come after it). At import the versions are compared and the hooks installed:
names, slots and the functions behind them. The layouts are verified on a probe tensor when a tensor is first marked.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Any

import torch

SUPPORTED = ((2, 7), (2, 8), (2, 9))
_REBUILD = (
    "Rebuild torch_xla_donate in this environment: pip install --no-build-isolation --force-reinstall --no-deps ."
)


def _minor(version: str) -> tuple[int, int]:
    """(2, 9) of '2.9.1+cu128'."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def supported_versions() -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)


def check_versions(torch_version: str, torch_xla_version: str, build: Any) -> None:
    """Raises ImportError unless the running torch and torch_xla are supported and those of the build.

    Args:
        torch_version: of the running torch, such as ``2.9.1+cu128``.
        torch_xla_version: of the installed torch_xla.
        build: has ``TORCH``, ``TORCH_XLA`` and ``CXX11_ABI``, as the generated ``_build_info`` does.
    """
    if _minor(torch_xla_version) not in SUPPORTED:
        raise ImportError(
            f"torch_xla_donate supports torch_xla {supported_versions()}; found torch_xla {torch_xla_version}. "
            "It relies on internals that were compared for these versions only. Install one of them."
        )
    if _minor(torch_version) != _minor(torch_xla_version):
        raise ImportError(
            f"torch {torch_version} and torch_xla {torch_xla_version} do not belong together; "
            "install the same minor version of both."
        )
    if (_minor(build.TORCH), _minor(build.TORCH_XLA)) != (_minor(torch_version), _minor(torch_xla_version)):
        raise ImportError(
            f"torch_xla_donate was built against torch {build.TORCH} and torch_xla {build.TORCH_XLA}; "
            f"found torch {torch_version} and torch_xla {torch_xla_version}. {_REBUILD}"
        )
    if bool(build.CXX11_ABI) != torch.compiled_with_cxx11_abi():
        raise ImportError(
            f"torch_xla_donate was built with the C++11 ABI {'on' if build.CXX11_ABI else 'off'}, "
            f"this torch with the other. {_REBUILD}"
        )


def load() -> Any:
    """Checks versions, loads the extension module and installs the hooks; ImportError if anything does not fit."""
    try:
        torch_xla_version = importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            f"torch_xla_donate needs torch_xla ({supported_versions()}), which is not installed for {sys.executable}."
        ) from error
    try:
        from torch_xla_donate import _build_info
    except ImportError as error:
        raise ImportError(f"torch_xla_donate has not been built. {_REBUILD}") from error
    check_versions(torch.__version__, torch_xla_version, _build_info)

    import torch_xla  # noqa: F401  (the module to be hooked must be loaded)

    from torch_xla_donate import _C

    return _C


def xlac() -> Any:
    """torch_xla's extension module."""
    import _XLAC

    return _XLAC


def install_hooks() -> None:
    """Puts the hooks in place; does nothing if they are. ImportError says what does not fit."""
    from torch_xla_donate import _C

    try:
        _C.install(xlac().__file__)
    except RuntimeError as error:
        raise ImportError(
            f"torch_xla_donate could not hook torch_xla {importlib.metadata.version('torch_xla')}: {error}. "
            f"torch_xla is unchanged. Supported are its stock wheels of {supported_versions()}."
        ) from error


def uninstall_hooks() -> None:
    """Puts torch_xla back as it was. RuntimeError if somebody else has patched it since."""
    from torch_xla_donate import _C

    left = _C.uninstall()
    if left:
        raise RuntimeError(
            f"{left} slots of torch_xla hold another tool's pointer that was put there after ours; "
            "undo that tool's patch first, then call this again."
        )


_verified = False


def verify_layouts() -> None:
    """Compares a probe tensor with the layouts relied on, once. ImportError (after unhooking) if one differs."""
    global _verified
    if _verified:
        return
    from torch_xla_donate import _C

    if not _C.installed():
        raise ImportError(
            "the hooks of torch_xla_donate are not installed: nothing can be donated. "
            "Call torch_xla_donate._host.install_hooks()."
        )
    import torch_xla

    probe = torch.zeros(3).to(torch_xla.device())
    # Uploads the probe and nothing else: other tensors' pending work stays pending.
    xlac()._xla_sync_multi([probe], [], True, True)
    try:
        _C.verify_layouts(probe, xlac()._xla_get_tensor_id(probe))
    except RuntimeError as error:
        _C.uninstall()
        raise ImportError(
            f"this torch_xla is laid out differently than torch_xla_donate expects: {error}. "
            "The hooks have been taken out again; torch_xla is unchanged."
        ) from error
    _verified = True


def buffer_pointer(tensor: torch.Tensor) -> int | None:
    """The address of a materialised tensor's memory; None where the platform does not tell (CPU does)."""
    try:
        return int(xlac()._unsafe_buffer_pointer(tensor))
    except RuntimeError:
        return None


def sharding_spec(tensor: torch.Tensor) -> str:
    """The tensor's sharding as XLA writes it; empty if it has none."""
    return str(xlac()._get_xla_sharding_spec(tensor))


def auto_sharding() -> bool:
    """Whether XLA chooses shardings by itself, in which case torch_xla ignores every donor."""
    return bool(xlac()._xla_get_auto_sharding())
