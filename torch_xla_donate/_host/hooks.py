"""Puts the hooks in and takes them out, and compares the host's layouts with those relied on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_xla_donate import _C
from torch_xla_donate._host.load import supported_versions, xlac
from torch_xla_donate._host.settings import in_eager_mode


def install_hooks() -> None:
    """Puts the hooks in place; does nothing if they are. ImportError says what does not fit."""
    try:
        _C.install(xlac().__file__)
    except RuntimeError as error:
        raise ImportError(
            f"torch_xla_donate could not hook torch_xla {importlib.metadata.version('torch_xla')}: {error}. "
            f"torch_xla is unchanged. Install a stock wheel of torch_xla {supported_versions()}."
        ) from error


def uninstall_hooks() -> None:
    """Puts torch_xla back as it was. RuntimeError if somebody else has patched it since."""
    left = _C.uninstall()
    if left:
        raise RuntimeError(
            f"another tool has patched {left} slots of torch_xla after torch_xla_donate did. "
            "Undo that tool's patch, then call this again."
        )


_verified = False


def verify_layouts() -> None:
    """Compares a probe tensor with the layouts relied on, once. ImportError (after unhooking) if one differs."""
    global _verified
    if _verified:
        return
    import torch_xla

    probe, number = _on_a_plain_thread(_probe, torch_xla.device())
    try:
        _C.verify_layouts(probe, number)
        _verify_executor()
    except RuntimeError as error:
        _C.uninstall()
        raise ImportError(
            f"this torch_xla is laid out differently than torch_xla_donate expects: {error}. "
            f"The hooks are removed, and torch_xla is unchanged. Install a stock wheel of torch_xla "
            f"{supported_versions()}."
        ) from error
    _verified = True


def _on_a_plain_thread(function: Callable[..., Any], *args: Any) -> Any:
    """What a call returns where no default device, trace or dispatch mode of this thread holds."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:
            outcome.set_exception(error)

    try:
        threading.Thread(target=run, daemon=True).start()
    except RuntimeError:  # the interpreter is ending, and starts no thread
        with _disable_current_modes():
            run()
    return outcome.result()


def _probe(device: torch.device) -> tuple[torch.Tensor, int]:
    """A fresh tensor that the device has, and torch_xla's number of it."""
    # Integers: XLA_USE_BF16 and a default dtype change what a float is.
    probe = torch.zeros(3, dtype=torch.int32).to(device)
    # Uploads the probe and nothing else: other tensors' pending work stays pending.
    xlac()._xla_sync_multi([probe], [], True, True)
    return probe, xlac()._xla_get_tensor_id(probe)


def _verify_executor() -> None:
    # Other threads may turn a switch between the question and the look.
    for attempt in reversed(range(100)):
        try:
            _C.verify_executor(in_eager_mode(), xlac()._get_allow_execution())
            return
        except RuntimeError:
            if attempt == 0:
                raise
