"""Switches of torch_xla that are thrown for a while, and given back whatever happens meanwhile."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from torch_xla_donate import _C
from torch_xla_donate._host.interrupts import Replaced
from torch_xla_donate._host.load import xlac
from torch_xla_donate._host.settings import in_eager_mode

# torch_xla's switches for compiling without a step are of the whole process. The threads of `torch_xla.launch`, one for
# each device, take turns; nobody waits for a device inside.
compiling = threading.RLock()


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
    """Sets torch_xla's private donation flag on the tensors' buffers: for compiling a graph, never for running one.

    The flags are set on other tensors of the same buffers, so that they can be taken back whatever becomes of these.
    """
    return DonorFlags(xlac()._get_tensors_xla_device_data_node(list(tensors))[1] if tensors else [])


class Tracing(_C.Scope):
    """Operations inside are recorded and do not run."""

    def __init__(self, lock: Any, seed: int) -> None:
        super().__init__(lock)
        self._seed = seed
        self._before: tuple[bool, str] | None = None

    def enter(self) -> None:
        eager = in_eager_mode()
        self._before = eager, xlac()._get_current_graph_name()
        if eager:
            xlac()._set_use_eager_mode(False)
        # Not torch_xla's own switch: it would stop the steps of other threads.
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
    """Operations inside are recorded and do not run. What is pending runs first.

    The random seed is afterwards what it was before.
    """
    import torch_xla

    seed = xlac()._xla_get_rng_seed()
    torch_xla.sync()
    torch_xla.core.xla_model.wait_device_ops()
    return Tracing(compiling, seed)


def is_refused_execution(error: RuntimeError) -> bool:
    """Whether something was refused to run while `tracing`."""
    return "Unexpected execution" in str(error)


class Compiling(_C.Scope):
    """Graphs are compiled inside, with the donors flagged, and do not run."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self._before: tuple[bool, bool] | None = None

    def enter(self) -> None:
        host = xlac()
        self._before = host._xla_get_enable_alias_with_buffer_donor_config(), host._get_allow_execution()
        host._xla_set_enable_alias_with_buffer_donor_config(True)
        host._set_allow_execution(True)  # to compile is an execution for torch_xla, too

    def leave(self, raised: bool) -> None:
        _C.take_order()
        if self._before is None:
            return
        aliases, executes = self._before
        xlac()._xla_set_enable_alias_with_buffer_donor_config(aliases)
        xlac()._set_allow_execution(executes)


def replaced(module: types.ModuleType, name: str, value: Any) -> Replaced:
    """Another value for a name of one of torch_xla's Python modules, for as long as the context holds."""
    return Replaced(module, name, value, compiling)


@contextlib.contextmanager
def graph_name(name: str) -> Iterator[None]:
    """The name of the HLO modules of graphs that are compiled inside."""
    saved = xlac()._get_current_graph_name()
    xlac()._set_current_graph_name(name)
    try:
        yield
    finally:
        xlac()._set_current_graph_name(saved)
