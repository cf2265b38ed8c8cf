"""Changes switches of torch_xla for a while, and always restores them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from torch_xla_donate import _C
from torch_xla_donate._host.interrupts import Switched
from torch_xla_donate._host.load import xlac
from torch_xla_donate._host.settings import in_eager_mode
from torch_xla_donate._host.tensors import tensor_id
from torch_xla_donate._locks import make_lock

# torch_xla's switches for compiling without a step belong to the whole process. The threads of `torch_xla.launch`, one
# for each device, take turns. A thread with this lock never waits for a device.
compiling = make_lock()


def run_step_closures() -> None:
    """Ends the step if closures of `xm.add_step_closure` wait for that, as `torch_xla.compile` always does."""
    context = xm._get_device_context()
    if getattr(context, "step_closures", None) or getattr(context, "async_step_closures", None):
        torch_xla.sync()


def donor_flags(tensors: Sequence[torch.Tensor]) -> Switched[bool]:
    """Sets torch_xla's private donation flag on the tensors' buffers, only to compile a graph.

    It sets the flags on other tensors of the same buffers, and so can always clear them.
    """
    shadows = xlac()._get_tensors_xla_device_data_node(list(tensors))[1] if tensors else []

    def write(on: bool) -> None:
        for shadow in shadows:
            xlac()._set_buffer_donation(shadow, on)

    return Switched(lambda: False, write, True)


class OrderedParameters(_C.Scope):
    """The hooks order the parameters of graphs hashed inside: XLA then gives each donor to the output computed from it.

    order: after the context, for each parameter of the last graph its buffer, and for a donor the number of the output.
    """

    def __init__(self, donors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._donors = donors
        self.order: list[tuple[int, int | None]] = []

    def enter(self) -> None:
        _C.order_parameters(self._donors)

    def leave(self, raised: bool) -> None:
        self.order = self.order or _C.take_order()


class Tracing(_C.Scope):
    """Runs pending work, then records operations inside without running them. Restores the random seed.

    Attributes:
        seed: the random seed of the first draw inside.
        first_id: tensors that were made before have smaller ids.
    """

    def __init__(self) -> None:
        super().__init__(compiling)
        self._seed = xlac()._xla_get_rng_seed()
        self._before: tuple[bool, str] | None = None
        torch_xla.sync()
        xm.wait_device_ops()
        self.seed = xlac()._xla_get_rng_seed()

    def enter(self) -> None:
        eager = in_eager_mode()
        self._before = eager, xlac()._get_current_graph_name()
        if eager:
            xlac()._set_use_eager_mode(False)
        # torch_xla's switch would stop the steps of other threads.
        _C.refuse_runs(True)
        self.first_id = tensor_id(torch.empty(0, device="xla"))
        # The program's casts would be constants of the graph, and those of the trace must not leave it.
        torch.clear_autocast_cache()

    def leave(self, raised: bool) -> None:
        if self._before is None:
            return
        eager, name = self._before
        torch.clear_autocast_cache()
        _C.refuse_runs(False)
        xlac()._set_current_graph_name(name)
        if eager:
            xlac()._set_use_eager_mode(True)
        xm.set_rng_state(self._seed)


def is_refused_execution(error: RuntimeError) -> bool:
    """Whether `Tracing` has refused to run a graph."""
    return "Unexpected execution" in str(error)


def compiling_graphs() -> Switched[tuple[bool, bool]]:
    """Inside, graphs are compiled with the flagged donors, and not run."""
    host = xlac()

    def read() -> tuple[bool, bool]:
        return host._xla_get_enable_alias_with_buffer_donor_config(), host._get_allow_execution()

    def write(values: tuple[bool, bool]) -> None:
        host._xla_set_enable_alias_with_buffer_donor_config(values[0])
        host._set_allow_execution(values[1])  # torch_xla counts a compilation as an execution

    return Switched(read, write, (True, True), compiling)


def current_device() -> str:
    """The current device of this thread, such as ``xla:0``. A compiled graph runs on it."""
    return str(xlac()._xla_get_default_device())


def on_device(devices: Sequence[int]) -> contextlib.AbstractContextManager[Any]:
    """A context in which the only one of these devices is the current one. Without devices it changes nothing."""
    names = [f"xla:{device}" for device in devices]
    if not names or names == [current_device()]:
        return contextlib.nullcontext()
    return Switched(current_device, xlac()._xla_set_default_device, *names)


def graph_name(name: str) -> Switched[str]:
    """Sets the name of the HLO modules that are compiled inside."""
    return Switched(xlac()._get_current_graph_name, xlac()._set_current_graph_name, name)
