"""The operations of JAX and of torch_xla_donate that the cases use, under the same names."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np

DEVICES = 4


class Side:
    """One of the two. Arrays, and the functions that `compile` makes, are the library's own."""

    name: str

    def compile(self, f: Any, **options: Any) -> Any:
        """`jax.jit`, or our `compile`."""
        raise NotImplementedError

    def array(self, *shape: int, value: float = 1.0, dtype: str = "float32") -> Any:
        """A computed array, filled with a value."""
        raise NotImplementedError

    def split(self, array: Any, axis: int | None = 0) -> Any:
        """The array split over the devices along an axis, or (None) whole on each; also inside a function."""
        raise NotImplementedError

    def leaves(self, tree: Any) -> list[Any]:
        raise NotImplementedError

    def map(self, f: Callable[..., Any], *trees: Any) -> Any:
        raise NotImplementedError

    def is_gone(self, array: Any) -> bool:
        raise NotImplementedError

    def to_numpy(self, array: Any) -> Any:
        raise NotImplementedError

    def cast(self, array: Any, dtype: str) -> Any:
        raise NotImplementedError

    def copied(self, array: Any) -> Any:
        """The array put on its device once more."""
        raise NotImplementedError

    def seen_from_outside(self, array: Any) -> Any:
        """Something on the host that shares the array's memory."""
        raise NotImplementedError

    def print(self, label: str, array: Any) -> None:
        """Prints `label: value` from inside a compiled function."""
        raise NotImplementedError

    def debug_nans(self) -> contextlib.AbstractContextManager[Any]:
        raise NotImplementedError

    def settle(self) -> None:
        """Waits until everything has run and is reported."""
        raise NotImplementedError

    # Shared by both sides.

    def gone(self, *trees: Any) -> list[bool]:
        return [self.is_gone(leaf) for tree in trees for leaf in self.leaves(tree)]

    def values(self, *trees: Any) -> list[Any]:
        """One number for each leaf whose elements are all equal, else a nested list."""
        found = [np.asarray(self.to_numpy(leaf)) for tree in trees for leaf in self.leaves(tree)]
        return [a.flat[0].item() if a.size and (a == a.flat[0]).all() else a.tolist() for a in found]

    def error(self, f: Callable[[], Any]) -> str:
        """The builtin class of the error that f raises, or `none`."""
        try:
            f()
            self.settle()
        except Exception as error:
            return next(c.__name__ for c in type(error).__mro__ if c.__module__ == "builtins")
        return "none"

    def flags(self, lowered: Any) -> list[bool]:
        """Which leaves of the arguments are donated."""
        return [leaf.donated for leaf in self.leaves(lowered.args_info)]

    def printed(self, f: Callable[[], Any]) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            f()
            self.settle()
        return out.getvalue()


class Jax(Side):
    name = "jax"

    def __init__(self) -> None:
        import jax

        # JAX reads JAX_PLATFORMS when it is imported: in a forked child that was before.
        jax.config.update("jax_platforms", "cpu")
        self.jax = jax
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))

    def compile(self, f: Any, **options: Any) -> Any:
        return self.jax.jit(f, **options)

    def array(self, *shape: int, value: float = 1.0, dtype: str = "float32") -> Any:
        return self.jax.numpy.full(shape, value, dtype)

    def split(self, array: Any, axis: int | None = 0) -> Any:
        spec = self.jax.P(*([None] * axis), "x") if axis is not None else self.jax.P()
        sharding = self.jax.sharding.NamedSharding(self.mesh, spec)
        if isinstance(array, self.jax.core.Tracer):
            return self.jax.lax.with_sharding_constraint(array, sharding)
        return self.jax.device_put(array, sharding)

    def leaves(self, tree: Any) -> list[Any]:
        return list(self.jax.tree.leaves(tree))

    def map(self, f: Callable[..., Any], *trees: Any) -> Any:
        return self.jax.tree.map(f, *trees)

    def is_gone(self, array: Any) -> bool:
        return bool(array.is_deleted())

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array)

    def cast(self, array: Any, dtype: str) -> Any:
        return array.astype(dtype)

    def copied(self, array: Any) -> Any:
        return self.jax.device_put(array, self.jax.devices()[0], may_alias=False)

    def seen_from_outside(self, array: Any) -> Any:
        return np.asarray(memoryview(array))

    def print(self, label: str, array: Any) -> None:
        self.jax.debug.print(label + ": {}", array)

    def debug_nans(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.jax.debug_nans(True)
        return context

    def settle(self) -> None:
        self.jax.effects_barrier()


class Ours(Side):
    name = "ours"

    def __init__(self, *, spmd: bool) -> None:
        import torch
        import torch_xla
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr
        from torch.utils import _pytree as pytree

        import torch_xla_donate

        self.torch, self.torch_xla, self.pytree, self.package = torch, torch_xla, pytree, torch_xla_donate
        if spmd:
            xr.use_spmd()
            self.xs, self.mesh = xs, xs.Mesh(np.arange(DEVICES), (DEVICES,), ("x",))

    def compile(self, f: Any, **options: Any) -> Any:
        return self.package.compile(f, **options)

    def array(self, *shape: int, value: float = 1.0, dtype: str = "float32") -> Any:
        # A 0-d array is computed: one from the host would be in a buffer that torch_xla shares.
        made = self.torch.full(shape or (1,), value, dtype=getattr(self.torch, dtype)).to("xla")
        if not shape:
            made = made.sum(dtype=made.dtype)
        self.torch_xla.sync(wait=True)
        return made

    def split(self, array: Any, axis: int | None = 0) -> Any:
        spec = tuple("x" if i == axis else None for i in range(array.ndim))
        self.xs.mark_sharding(array, self.mesh, spec)
        return array

    def leaves(self, tree: Any) -> list[Any]:
        return self.pytree.tree_leaves(tree)

    def map(self, f: Callable[..., Any], *trees: Any) -> Any:
        return self.pytree.tree_map(f, *trees)

    def is_gone(self, array: Any) -> bool:
        return self.package.is_donated(array)

    def to_numpy(self, array: Any) -> Any:
        return array.cpu().numpy()

    def cast(self, array: Any, dtype: str) -> Any:
        return array.to(getattr(self.torch, dtype))

    def copied(self, array: Any) -> Any:
        made = array.clone()
        self.torch_xla.sync(wait=True)
        return made

    def seen_from_outside(self, array: Any) -> Any:
        from torch_xla.utils import dlpack

        return self.torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(array)).numpy()

    def print(self, label: str, array: Any) -> None:
        print(f"{label}: {array.item()}")

    def debug_nans(self) -> contextlib.AbstractContextManager[Any]:
        context: contextlib.AbstractContextManager[Any] = self.package.debug_nans()
        return context

    def settle(self) -> None:
        self.torch_xla.sync(wait=True)
        self.package.donation_report()
