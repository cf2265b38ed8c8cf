"""Switches of torch_xla that are thrown for a while, and given back whatever happens meanwhile; `_host` throws them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from torch_xla_donate import _C, _host


class DonorFlags(_C.Scope):
    """Sets torch_xla's private donation flag on buffers, through separate tensors that share them."""

    def __init__(self, shadows: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._shadows = shadows

    def enter(self) -> None:
        for shadow in self._shadows:
            _host.xlac()._set_buffer_donation(shadow, True)

    def leave(self, raised: bool) -> None:
        for shadow in self._shadows:
            _host.xlac()._set_buffer_donation(shadow, False)


class Tracing(_C.Scope):
    """Operations inside are recorded and do not run."""

    def __init__(self, lock: Any, seed: int) -> None:
        super().__init__(lock)
        self._seed = seed
        self._before: tuple[bool, str] | None = None

    def enter(self) -> None:
        eager = _host.in_eager_mode()
        self._before = eager, _host.xlac()._get_current_graph_name()
        if eager:
            _host.xlac()._set_use_eager_mode(False)
        # Not torch_xla's own switch: it would stop the steps of other threads.
        _C.refuse_runs(True)

    def leave(self, raised: bool) -> None:
        if self._before is None:
            return
        eager, name = self._before
        _C.refuse_runs(False)
        _host.xlac()._set_current_graph_name(name)
        if eager:
            _host.xlac()._set_use_eager_mode(True)
        xm.set_rng_state(self._seed)


class Compiling(_C.Scope):
    """Graphs are compiled inside, with the donors flagged, and do not run."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self._before: tuple[bool, bool] | None = None

    def enter(self) -> None:
        host = _host.xlac()
        self._before = host._xla_get_enable_alias_with_buffer_donor_config(), host._get_allow_execution()
        host._xla_set_enable_alias_with_buffer_donor_config(True)
        host._set_allow_execution(True)  # to compile is an execution for torch_xla, too

    def leave(self, raised: bool) -> None:
        _C.take_order()
        if self._before is None:
            return
        aliases, executes = self._before
        _host.xlac()._xla_set_enable_alias_with_buffer_donor_config(aliases)
        _host.xlac()._set_allow_execution(executes)


class Replaced(_C.Scope):
    """As `_host.replaced`."""

    def __init__(self, lock: Any, module: types.ModuleType, name: str, value: Any) -> None:
        super().__init__(lock)
        self._module, self._name, self._value = module, name, value
        self._original: list[Any] = []

    def enter(self) -> None:
        self._original.append(getattr(self._module, self._name))
        setattr(self._module, self._name, self._value)

    def leave(self, raised: bool) -> None:
        for original in self._original:
            setattr(self._module, self._name, original)
