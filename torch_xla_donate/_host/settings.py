"""What torch_xla and its runtime are set to."""

from __future__ import annotations

from typing import Any

import torch

from torch_xla_donate import _C, _config
from torch_xla_donate._host.load import xlac


def runtime() -> Any:
    """torch_xla.runtime."""
    import torch_xla.runtime

    return torch_xla.runtime


def device_count() -> int:
    """How many devices there are, over all hosts."""
    return int(runtime().global_runtime_device_count())


def process_count() -> int:
    """How many processes run the program: as the runtime says, or torchrun, of which it knows nothing on the CPU."""
    return max(int(runtime().process_count()), _config.world_size())


AUTO_SHARDING = "auto-sharding (XLA_AUTO_SPMD=1 or xr.use_spmd(auto=True))"


def auto_sharding() -> bool:
    """Whether XLA chooses shardings by itself, in which case torch_xla ignores every donor."""
    return bool(xlac()._xla_get_auto_sharding())


# By name: what each has to be, and is by default.
_NEEDED_TO_DONATE = {"XLA_ENABLE_PARAM_ALIASING": True, "XLA_STABLEHLO_COMPILE": False, "XLA_AUTO_SPMD": False}


def ignoring_donors() -> list[str]:
    """The settings that make torch_xla ignore every donor, such as ``XLA_ENABLE_PARAM_ALIASING=0``."""
    # At every donation, for which os.environ is slow.
    return [
        f"{name}={value}"
        for name, needed in _NEEDED_TO_DONATE.items()
        if (value := _C.environment(name)) is not None and _config.is_yes(value) is not needed
    ]


def ignores_donors() -> str:
    """The setting that makes torch_xla ignore every donor; empty if none does. The hooks are told, too."""
    setting = AUTO_SHARDING if auto_sharding() else next(iter(ignoring_donors()), "")
    _C.set_switched_off(setting)
    return setting


def in_eager_mode() -> bool:
    """Whether torch_xla runs each operation at once."""
    return bool(xlac()._get_use_eager_mode())


def autocast_state() -> tuple[Any, ...]:
    """What torch.autocast does to operations on XLA tensors here."""
    enabled = torch.is_autocast_enabled("xla")
    return (enabled, torch.get_autocast_dtype("xla") if enabled else None)


def functions_of_a_step() -> tuple[Any, Any]:
    """torch_xla's functions that the hooks call at a step that may donate.

    The first sets the token that orders collectives within a step; with None it drops it. The second answers whether
    auto-sharding is on, which a program may switch on at any time.
    """
    return xlac()._set_all_reduce_token, xlac()._xla_get_auto_sharding
