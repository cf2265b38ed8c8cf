"""Installs and removes the hooks, and verifies the layouts of torch_xla."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch_xla
from torch.utils._python_dispatch import _disable_current_modes

from torch_xla_donate import _C
from torch_xla_donate._host.load import supported_versions, xlac


def install_hooks() -> None:
    """Installs the hooks, unless they are installed. Raises ImportError if torch_xla does not fit."""
    try:
        _C.install(xlac().__file__)
    except RuntimeError as error:
        raise ImportError(
            f"torch_xla_donate could not hook torch_xla {importlib.metadata.version('torch_xla')}: {error}. "
            f"{'' if 'put back' in str(error) else 'torch_xla is unchanged. '}Install a stock wheel of torch_xla "
            f"{supported_versions()}."
        ) from error


def uninstall_hooks() -> None:
    """Removes the hooks. Raises RuntimeError if another tool has patched the slots since."""
    left = _C.uninstall()
    if left:
        raise RuntimeError(
            f"another tool has patched {left} slots of torch_xla after torch_xla_donate did. "
            "Undo that tool's patch, then call this again."
        )


_verified = False


def verify_layouts() -> None:
    """Compares a probe tensor with the expected layouts, once. Unhooks and raises ImportError if one differs."""
    global _verified
    if _verified:
        return
    probe, number = _on_a_plain_thread(_probe, torch_xla.device())
    # After xr.use_spmd() was called twice, torch_xla shards fresh tensors as replicated.
    is_sharded = xlac()._get_xla_sharding_type(probe) is not None
    try:
        _C.verify_layouts(probe, number, is_sharded)
    except RuntimeError as error:
        left = _C.uninstall()
        removed = "The hooks are removed, and torch_xla is unchanged"
        raise ImportError(
            f"this torch_xla is laid out differently than torch_xla_donate expects: {error}. "
            f"{f'Another tool holds {left} slots of the hooks: restart the process' if left else removed}. Install a "
            f"stock wheel of torch_xla {supported_versions()}."
        ) from error
    _verified = True


def _on_a_plain_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the function without the default device, traces and dispatch modes of this thread."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # an ending interpreter starts no thread
        with _disable_current_modes():
            run()
    return outcome.result()


def _probe(device: torch.device) -> tuple[torch.Tensor, int]:
    """A fresh tensor with a buffer, and torch_xla's number of it."""
    # Integers: XLA_USE_BF16 and a default dtype change what a float is.
    probe = torch.zeros(3, dtype=torch.int32).to(device)
    # Uploads only the probe. Other pending work stays pending.
    xlac()._xla_sync_multi([probe], [], True, True)
    return probe, xlac()._xla_get_tensor_id(probe)
