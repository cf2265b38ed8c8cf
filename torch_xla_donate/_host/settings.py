"""Settings of torch_xla and its runtime."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch_xla.runtime

from torch_xla_donate import _C, _config
from torch_xla_donate._host.load import xlac


def runtime() -> Any:
    """torch_xla.runtime."""
    return torch_xla.runtime


def process_count() -> int:
    """The number of processes that run the program, from the runtime or from torchrun, which a CPU runtime ignores."""
    number = os.environ.get("WORLD_SIZE", "")
    return max(int(runtime().process_count()), int(number) if number.isdecimal() else 1)


AUTO_SHARDING = "auto-sharding (XLA_AUTO_SPMD=1 or xr.use_spmd(auto=True))"


# Whether XLA chooses the shardings. torch_xla then ignores every donor. Looked up once, because each mark asks.
# TORCH_XLA_DONATE=0 also works beside a torch_xla that lacks it.
auto_sharding: Callable[[], bool] = getattr(xlac(), "_xla_get_auto_sharding", bool)

# The value of each that donation needs, which is the default.
_NEEDED_TO_DONATE = {"XLA_ENABLE_PARAM_ALIASING": True, "XLA_STABLEHLO_COMPILE": False, "XLA_AUTO_SPMD": False}
_NAMES = (*_NEEDED_TO_DONATE, _config.STRICT)


def ignoring_donors() -> list[str]:
    """The settings that make torch_xla ignore every donor, such as ``XLA_ENABLE_PARAM_ALIASING=0``."""
    # `_C` reads what torch_xla reads, and os.environ is slow.
    return [
        f"{name}={value}"
        for name, needed in _NEEDED_TO_DONATE.items()
        if (value := _C.environment(name)) is not None and _config.is_yes(value) is not needed
    ]


def ignores_donors() -> str:
    """The setting that makes torch_xla ignore every donor; empty if there is none. Passes it to the hooks."""
    setting = AUTO_SHARDING if auto_sharding() else next(iter(ignoring_donors()), "")
    _C.set_switched_off(setting)
    return setting


def is_ready() -> bool:
    """Whether the hooks are in place, no step has a notice, and no variable or setting changes what a mark does.

    A quick answer for each donation; `ignores_donors` reads the settings.
    """
    return bool(_C.is_ready(_NAMES)) and not auto_sharding()


def in_eager_mode() -> bool:
    """Whether torch_xla runs each operation at once."""
    return bool(xlac()._get_use_eager_mode())


def autocast_state() -> tuple[Any, ...]:
    """Whether torch.autocast is on for XLA tensors in this thread, and its dtype."""
    enabled = torch.is_autocast_enabled("xla")
    return (enabled, torch.get_autocast_dtype("xla") if enabled else None)


def in_dual_level() -> bool:
    """Whether a thread of the process is inside `torch.autograd.forward_ad.dual_level`, where tensors have tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def functions_of_a_step() -> tuple[Any, Any, Any]:
    """torch_xla's functions that the hooks call.

    The first sets the token that orders collectives within a step; None drops the token. The second returns whether
    auto-sharding is on, which a program may change at any time, and the third whether eager mode is.
    """
    return xlac()._set_all_reduce_token, auto_sharding, xlac()._get_use_eager_mode
