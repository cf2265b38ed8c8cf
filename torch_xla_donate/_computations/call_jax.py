"""call_jax: torch_xla's, where the donated arguments of a jitted JAX function reach the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla_donate import _config, _frames, _host, _trees
from torch_xla_donate._computations.user_computation import give, to_donate
from torch_xla_donate._errors import DonationError, see


def call_jax(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    override_hash: Any = None,
    *,
    strict: bool | None = None,
) -> Any:
    """`torch_xla.core.xla_builder.call_jax`, which donates what a jitted function's ``donate_argnums`` name.

    Each tensor of an argument that ``jax.jit(f, donate_argnums=..., donate_argnames=...)`` donates is given to the next
    step, as with `donate_buffer`, and asks for the output that JAX would put there, as ``into=`` does. Only ``f``'s own
    jit counts: a jitted function that is called inside of ``f`` donates nothing, as under ``jax.jit``. Without donation
    it is torch_xla's function.

    Args:
        f: a JAX function, traced once for each set of shapes, dtypes and other values among its arguments.
        args: its positional arguments, pytrees of XLA tensors and of what JAX takes for static or constant.
        kwargs: its keyword arguments.
        name: as in torch_xla.
        override_hash: as in torch_xla: stands for ``f`` in the caches, where ``f`` is made anew at each call. What is
            donated is what the ``f`` of this call donates.
        strict: as for `user_computation`.

    Returns:
        What ``f`` returns, with pending XLA tensors for its arrays.

    Raises:
        ImportError: jax or torchax is missing.
        TypeError: ``strict`` is no bool.
        ValueError: a donated tensor is passed a second time where it is not donated, or a tensor has 64 bits and JAX
            works with 32.
        DonationError: a donated tensor is pending, or shares a buffer that torch_xla keeps for everybody.
        DonatedBufferError: an argument has been donated before.
    """
    _config.check_strict(strict)
    where = _frames.call_site()
    jax, torchax = _host.import_jax()
    tree = (args, kwargs or {})
    leaves, spec = jax.tree.flatten(tree)
    if not isinstance(f, jax.stages.Wrapped) or any(isinstance(leaf, torchax.tensor.Tensor) for leaf in leaves):
        return _host.call_jax(f, args, kwargs, name, override_hash)
    offered = _offered(f, leaves, spec, tree, override_hash)
    donated = to_donate(leaves, offered.donors, offered, where, strict)
    results = _host.call_jax(f, args, kwargs, name, override_hash)
    if donated:
        outputs = jax.tree.leaves(results)
        pairs = _host.paired([leaves[index] for index in donated], outputs)
        targets = {donated[donor]: outputs[output] for donor, output in pairs}
        give(leaves, donated, offered, where, strict, targets)
    return results


class _Offered:
    """Which leaves of a call's arguments its function donates.

    donors: their numbers, tensors only.
    """

    def __init__(self, f: Callable[..., Any], leaves: Sequence[Any], spec: Any, tree: Any) -> None:
        self._names = _names(f, tree)
        flags = _donated(f, leaves, spec)
        self.donors = [index for index in flags if isinstance(leaves[index], torch.Tensor)]
        if self.donors:
            self._check_bits(leaves)

    def name(self, index: int) -> str:
        return self._names[index]

    def _check_bits(self, leaves: Sequence[Any]) -> None:
        # torch_xla finds the difference when it lowers the step, which loses all that is pending then.
        jax, _ = _host.import_jax()
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and jax.dtypes.canonicalize_dtype(_dtype(leaf.dtype)) != _dtype(
                leaf.dtype
            ):
                raise ValueError(
                    f"{self.name(index)} is {_trees.dtype_and_shape(leaf)}, but JAX works with 32 bits. Call "
                    "jax.config.update('jax_enable_x64', True) first, or cast the tensor. "
                    f"{see('user_computations')}"
                )


def _dtype(dtype: torch.dtype) -> Any:
    _, torchax = _host.import_jax()
    return torchax.ops.mappings.t2j_dtype(dtype)


def _label(f: Any) -> str:
    return str(getattr(f, "__name__", type(f).__name__))


def _names(f: Callable[..., Any], tree: Any) -> list[str]:
    """``args[0]['w'] of update`` for each leaf."""
    jax, _ = _host.import_jax()
    return [
        f"{('args', 'kwargs')[path[0].idx]}{jax.tree_util.keystr(path[1:])} of {_label(f)}"
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _donated(f: Any, leaves: Sequence[Any], spec: Any) -> list[int]:
    """The numbers of the leaves that a jitted function donates."""
    jax, _ = _host.import_jax()

    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return jax.ShapeDtypeStruct(leaf.shape, _dtype(leaf.dtype))
        return _dtype(leaf) if isinstance(leaf, torch.dtype) else leaf

    traced = [abstract(leaf) for leaf in leaves]
    with _host.jax_environment():
        args, kwargs = jax.tree.unflatten(spec, traced)
        infos, found = jax.tree.flatten(f.trace(*args, **kwargs).args_info)
        if found == spec or not any(info.donated for info in infos):
            return [index for index, info in enumerate(infos) if info.donated]
        # Static arguments are missing there. A call of f by another function tells which of its arguments it donates.
        arrays = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

        def caller(*tensors: Any) -> Any:
            given = dict(zip(arrays, tensors))
            args, kwargs = jax.tree.unflatten(spec, [given.get(index, leaf) for index, leaf in enumerate(traced)])
            return f(*args, **kwargs)

        program = jax.jit(caller).trace(*[traced[index] for index in arrays]).jaxpr.jaxpr
    calls = [equation.params["donated_invars"] for equation in program.eqns if "donated_invars" in equation.params]
    if not calls:
        raise DonationError(
            f"{_label(f)} is jitted with static arguments and inline=True, so JAX does not report which arguments it "
            f"donates. Remove inline=True. Nothing was donated. {see('user_computations')}"
        )
    place = {id(variable): index for variable, index in zip(program.invars, arrays)}
    return sorted(
        place[id(variable)]
        for equation in program.eqns
        for variable, donated in zip(equation.invars, equation.params.get("donated_invars", ()))
        if donated and id(variable) in place
    )


# torch_xla keeps the computations of a function, or of the hash that stands for it, in the same way.
_by_function: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, _Offered]] = weakref.WeakKeyDictionary()
_by_hash: dict[Any, dict[Any, _Offered]] = {}


def _offered(f: Callable[..., Any], leaves: Sequence[Any], spec: Any, tree: Any, override_hash: Any) -> _Offered:
    donation = _host.jit_donation(f) if override_hash else None
    if donation is None:
        known = _by_function.setdefault(f, {})
    else:
        # The hash stands for what is computed alone: another function of the same one may donate other arguments.
        known = _by_hash.setdefault((override_hash, _label(f), donation), {})
    key = (spec, *[(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])
    found = known.get(key)
    if found is None:
        found = known[key] = _Offered(f, leaves, spec, tree)
    return found
