"""Hooks of torch.nn's modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of the module runs more than its forward."""
    from torch.nn.modules import module as modules

    return bool(
        type(module).__call__ is not torch.nn.Module.__call__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or modules._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def remove_module_hook(hook: Callable[..., Any]) -> None:
    """Removes a global forward hook without its handle, since an interrupt may come before the handle is stored."""
    from torch.nn.modules import module as modules

    hooks = modules._global_forward_pre_hooks
    for key in [key for key, found in list(hooks.items()) if found == hook]:
        hooks.pop(key, None)
