"""JAX and torchax, as torch_xla imports and calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


@functools.cache
def import_jax() -> tuple[Any, Any]:
    """Imports jax and torchax as torch_xla does. Raises ImportError if one is missing."""
    from torch_xla._internal import jax_workarounds

    jax_workarounds.jax_import_guard()  # type: ignore[no-untyped-call]
    with jax_workarounds.jax_env_context():
        try:
            import jax
            import torchax  # before its submodules: the error then names torchax
            import torchax.interop
            import torchax.ops.mappings
        except ImportError as error:
            raise ImportError(
                f"call_jax needs jax and torchax: {error}. Install the versions that it was tested with, on Python "
                "3.11 or newer: pip install jax==0.7.1 jaxlib==0.7.1 torchax==0.0.13"
            ) from error
    # Changes settings now, because a later change would make JAX trace again.
    jax_workarounds.maybe_get_jax(log=False)  # type: ignore[no-untyped-call]
    return jax, torchax


def call_jax(f: Callable[..., Any], args: Any, kwargs: Any, name: str | None, override_hash: Any) -> Any:
    """torch_xla's call_jax."""
    from torch_xla.core import xla_builder

    return xla_builder.call_jax(f, args, kwargs, name, override_hash)


def jit_donation(f: Any) -> tuple[Any, Any] | None:
    """The numbers and names of the arguments that a jitted function donates; None if they need a trace."""
    info = getattr(f, "_jit_info", None)
    return None if info is None else (info.donate_argnums, info.donate_argnames)


def jax_environment() -> contextlib.AbstractContextManager[None]:
    """The settings of torch_xla for a trace of JAX."""
    from torch_xla._internal import jax_workarounds

    return jax_workarounds.jax_env_context()


def paired(donors: Sequence[Any], outputs: Sequence[Any]) -> list[tuple[int, int]]:
    """Pairs donors with outputs as JAX does: an output takes the next donor of its shape and dtype.

    Returns places in `donors` and in `outputs`, in the order of the outputs. It skips outputs that are not tensors.
    """
    free: dict[Any, list[int]] = {}
    for place in reversed(range(len(donors))):
        free.setdefault((donors[place].shape, donors[place].dtype), []).append(place)
    tensors = [(place, output) for place, output in enumerate(outputs) if isinstance(output, torch.Tensor)]
    kinds = [(place, (output.shape, output.dtype)) for place, output in tensors]
    return [(free[kind].pop(), place) for place, kind in kinds if free.get(kind)]
