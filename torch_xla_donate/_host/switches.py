"""Changes switches of torch_xla for a while, and always restores them."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from torch_xla_donate import _C
from torch_xla_donate._host.interrupts import Replaced
from torch_xla_donate._host.load import xlac
from torch_xla_donate._host.settings import in_eager_mode
from torch_xla_donate._locks import make_lock

# torch_xla's switches for compiling without a step belong to the whole process. The threads of `torch_xla.launch`, one
# for each device, take turns. A thread with this lock never waits for a device.
compiling = make_lock()


class DonorFlags(_C.Scope):
    """Sets torch_xla's private donation flag on buffers, through separate tensors that share them."""

    def __init__(self, shadows: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._shadows = shadows

    def enter(self) -> None:
        for shadow in self._shadows:
            xlac()._set_buffer_donation(shadow, True)

    def leave(self, raised: bool) -> None:
        for shadow in self._shadows:
            xlac()._set_buffer_donation(shadow, False)


def donor_flags(tensors: Sequence[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Sets torch_xla's private donation flag on the tensors' buffers, only to compile a graph.

    It sets the flags on other tensors of the same buffers, and so can always clear them.
    """
    return DonorFlags(xlac()._get_tensors_xla_device_data_node(list(tensors))[1] if tensors else [])


def is_tracing() -> bool:
    """Whether this thread is inside `tracing`."""
    return _C.refuses_runs()


class Tracing(_C.Scope):
    """Records operations without running them."""

    def __init__(self, lock: Any, seed: int) -> None:
        super().__init__(lock)
        self._seed = seed
        self._before: tuple[bool, str] | None = None

    def enter(self) -> None:
        eager = in_eager_mode()
        self._before = eager, xlac()._get_current_graph_name()
        if eager:
            xlac()._set_use_eager_mode(False)
        # torch_xla's switch would stop the steps of other threads.
        _C.refuse_runs(True)

    def leave(self, raised: bool) -> None:
        if self._before is None:
            return
        eager, name = self._before
        _C.refuse_runs(False)
        xlac()._set_current_graph_name(name)
        if eager:
            xlac()._set_use_eager_mode(True)
        xm.set_rng_state(self._seed)


def tracing() -> contextlib.AbstractContextManager[Any]:
    """Runs pending work, then records operations inside without running them. Restores the random seed."""
    seed = xlac()._xla_get_rng_seed()
    torch_xla.sync()
    torch_xla.core.xla_model.wait_device_ops()
    return Tracing(compiling, seed)


def is_refused_execution(error: RuntimeError) -> bool:
    """Whether `tracing` has refused to run a graph."""
    return "Unexpected execution" in str(error)


class Compiling(_C.Scope):
    """Compiles graphs with the flagged donors, without running them."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self._before: tuple[bool, bool] | None = None

    def enter(self) -> None:
        host = xlac()
        self._before = host._xla_get_enable_alias_with_buffer_donor_config(), host._get_allow_execution()
        host._xla_set_enable_alias_with_buffer_donor_config(True)
        host._set_allow_execution(True)  # torch_xla counts a compilation as an execution

    def leave(self, raised: bool) -> None:
        _C.take_order()
        if self._before is None:
            return
        aliases, executes = self._before
        xlac()._xla_set_enable_alias_with_buffer_donor_config(aliases)
        xlac()._set_allow_execution(executes)


def replaced(module: types.ModuleType, name: str, value: Any) -> Replaced:
    """Replaces the value of a name in one of torch_xla's Python modules inside the context."""
    return Replaced(module, name, value, compiling)


def current_device() -> str:
    """The current device of this thread, such as ``xla:0``. A compiled graph runs on it."""
    return str(xlac()._xla_get_default_device())


class OnDevice(_C.Scope):
    """Another device is the current one of this thread."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._before = ""

    def enter(self) -> None:
        self._before = current_device()
        xlac()._xla_set_default_device(self._device)

    def leave(self, raised: bool) -> None:
        if self._before:
            xlac()._xla_set_default_device(self._before)


def on_device(devices: Sequence[int]) -> contextlib.AbstractContextManager[Any]:
    """A context in which the only one of these devices is the current one. Without devices it changes nothing."""
    names = [f"xla:{device}" for device in devices]
    return contextlib.nullcontext() if not names or names == [current_device()] else OnDevice(*names)


@contextlib.contextmanager
def graph_name(name: str) -> Iterator[None]:
    """Sets the name of the HLO modules that are compiled inside."""
    saved = xlac()._get_current_graph_name()
    xlac()._set_current_graph_name(name)
    try:
        yield
    finally:
        xlac()._set_current_graph_name(saved)
