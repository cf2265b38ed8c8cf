"""SPMD in a child: a mesh of all its devices, and arrays that are cut along it."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr


@functools.cache
def mesh() -> xs.Mesh:
    """All devices in a row, along the axis `x`. The first call switches SPMD on, so it comes before any array."""
    xr.use_spmd()
    count = xr.global_runtime_device_count()
    return xs.Mesh(np.arange(count), (count,), ("x",))


def shard(tensor: torch.Tensor, *spec: str | None) -> torch.Tensor:
    """Cuts the tensor along its dimensions that have an "x"; returns it."""
    xs.mark_sharding(tensor, mesh(), spec)
    return tensor
