"""The modules that a trace calls."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from torch_xla_donate import _C, _host


class ModulesCalled(_C.Scope):
    """Notes the modules that a trace calls, and their modes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[weakref.ref[torch.nn.Module], bool]] = []
        self._seen: set[int] = set()

    def enter(self) -> None:
        torch.nn.modules.module.register_module_forward_pre_hook(self.note)

    def leave(self, raised: bool) -> None:
        _host.remove_module_hook(self.note)

    def note(self, module: torch.nn.Module, _: Any = None) -> None:
        if id(module) not in self._seen:
            self._seen.add(id(module))
            self.found.append((weakref.ref(module), module.training))
