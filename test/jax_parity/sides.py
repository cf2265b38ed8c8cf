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
    compile: Callable[..., Any]  #: `jax.jit`, or our `compile`
    array: Callable[..., Any]  #: (*shape, value=1.0, dtype="float32"): a computed array, filled with a value
    split: Callable[..., Any]  #: (array, axis=0): split over the devices, or (None) whole on each; also in a function
    leaves: Callable[[Any], list[Any]]
    map: Callable[..., Any]  #: (f, *trees)
    is_gone: Callable[[Any], bool]
    to_numpy: Callable[[Any], Any]
    cast: Callable[[Any, str], Any]
    copied: Callable[[Any], Any]  #: the array put on its device once more
    seen_from_outside: Callable[[Any], Any]  #: something on the host that shares the array's memory
    print: Callable[[str, Any], None]  #: prints `label: value` from inside a compiled function
    debug_nans: Callable[[], contextlib.AbstractContextManager[Any]]
    settle: Callable[[], None]  #: waits until everything has run and is reported

    # Shared by both sides.

    def gone(self, *trees: Any) -> list[bool]:
        return [self.is_gone(leaf) for tree in trees for leaf in self.leaves(tree)]

    def values(self, *trees: Any) -> list[Any]:
        """One number for each leaf whose elements are all equal, else a nested list."""
        found = [np.asarray(self.to_numpy(leaf)) for tree in trees for leaf in self.leaves(tree)]
        return [a.flat[0].item() if a.size and (a == a.flat[0]).all() else a.tolist() for a in found]

    def donate(self, f: Callable[..., Any], *given: Any, named: Any = None, **options: Any) -> dict[str, Any]:
        """Calls a function that was compiled with the options: what is gone then, and the values of the results."""
        arguments = (*given, *(named or {}).values())
        out = self.compile(f, **options)(*given, **(named or {}))
        gone = self.gone(*arguments)
        self.settle()
        deleted = self.gone(*arguments)
        assert all(early or not late for early, late in zip(gone, deleted)), "gone only after the next step"
        return {"deleted": deleted, "values": self.values(out)}

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
        self.compile, self.leaves, self.map = jax.jit, jax.tree.leaves, jax.tree.map
        self.is_gone = lambda array: array.is_deleted()
        self.to_numpy = np.asarray
        self.cast = lambda array, dtype: array.astype(dtype)
        self.copied = lambda array: jax.device_put(array, jax.devices()[0], may_alias=False)
        self.seen_from_outside = lambda array: np.asarray(memoryview(array))
        self.print = lambda label, array: jax.debug.print(label + ": {}", array)
        self.debug_nans = lambda: jax.debug_nans(True)
        self.settle = jax.effects_barrier
        self.array = lambda *shape, value=1.0, dtype="float32": jax.numpy.full(shape, value, dtype)
        self.split = self._split

    def _split(self, array: Any, axis: int | None = 0) -> Any:
        spec = self.jax.P(*([None] * axis), "x") if axis is not None else self.jax.P()
        sharding = self.jax.sharding.NamedSharding(self.mesh, spec)
        if isinstance(array, self.jax.core.Tracer):
            return self.jax.lax.with_sharding_constraint(array, sharding)
        return self.jax.device_put(array, sharding)


class Ours(Side):
    name = "ours"

    def __init__(self, *, spmd: bool) -> None:
        import torch
        import torch_xla
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr
        from torch.utils import _pytree as pytree
        from torch_xla.utils import dlpack

        import torch_xla_donate

        self.torch, self.torch_xla, self.package = torch, torch_xla, torch_xla_donate
        if spmd:
            xr.use_spmd()
            self.xs, self.mesh = xs, xs.Mesh(np.arange(DEVICES), (DEVICES,), ("x",))
        self.compile, self.debug_nans = torch_xla_donate.compile, torch_xla_donate.debug_nans
        self.leaves, self.map, self.is_gone = pytree.tree_leaves, pytree.tree_map, torch_xla_donate.is_donated
        self.to_numpy = lambda array: array.cpu().numpy()
        self.cast = lambda array, dtype: array.to(getattr(torch, dtype))
        self.seen_from_outside = lambda array: torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(array)).numpy()
        self.print = lambda label, array: print(f"{label}: {array.item()}")
        self.array, self.split, self.copied, self.settle = self._array, self._split, self._copied, self._settle

    def _array(self, *shape: int, value: float = 1.0, dtype: str = "float32") -> Any:
        # A 0-d array is computed: one from the host would be in a buffer that torch_xla shares.
        made = self.torch.full(shape or (1,), value, dtype=getattr(self.torch, dtype)).to("xla")
        if not shape:
            made = made.sum(dtype=made.dtype)
        self.torch_xla.sync(wait=True)
        return made

    def _split(self, array: Any, axis: int | None = 0) -> Any:
        self.xs.mark_sharding(array, self.mesh, tuple("x" if i == axis else None for i in range(array.ndim)))
        return array

    def _copied(self, array: Any) -> Any:
        made = array.clone()
        self.torch_xla.sync(wait=True)
        return made

    def _settle(self) -> None:
        self.torch_xla.sync(wait=True)
        self.package.donation_report()
