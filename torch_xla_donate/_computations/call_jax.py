"""call_jax: torch_xla's function, which also donates the donated arguments of a jitted JAX function."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from torch_xla_donate import _config, _host, _marks, _trees
from torch_xla_donate._computations.user_computation import give, to_donate
from torch_xla_donate._errors import DonationError, see


def call_jax(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    name: str | None = None,
    override_hash: Any = None,
    *,
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> Any:
    """`torch_xla.core.xla_builder.call_jax`, which also donates the donated arguments of a jitted function.

    The next step may reuse each tensor of an argument that ``jax.jit(f, donate_argnums=..., donate_argnames=...)``
    donates, as with `donate_buffer`. The buffer goes to the output that JAX would choose, as with ``into=``. A jitted
    function that ``f`` calls donates nothing, as under ``jax.jit``. Without donation this is torch_xla's function.

    Args:
        f: a JAX function, traced once for each set of shapes, dtypes and other values among its arguments.
        args: its positional arguments: pytrees of XLA tensors, and of static arguments and constants.
        kwargs: its keyword arguments.
        name: as in torch_xla.
        override_hash: as in torch_xla. It replaces ``f`` as the key of caches if each call makes a new ``f``. The
            donated arguments are those of the ``f`` of this call.
        strict: as for `user_computation`.
        stacklevel: as for `user_computation`.

    Returns:
        The result of ``f``, with pending XLA tensors for its arrays.

    Raises:
        ImportError: jax or torchax is missing.
        TypeError: ``strict`` or ``stacklevel`` has another type.
        ValueError: an argument that is not donated shares the buffer of a donated one, or a tensor has 64 bits and JAX
            works with 32.
        DonationError: a donated tensor is pending, or torch_xla shares its buffer between tensors.
        DonatedBufferError: a step has consumed an argument.
    """
    request = _marks.DonationRequest.make(strict, stacklevel)
    jax, torchax = _host.import_jax()
    if _config.IS_OFF:
        return _host.call_jax(f, args, kwargs, name, override_hash)
    tree = (args, kwargs or {})
    leaves, spec = jax.tree.flatten(tree)
    is_foreign = any(isinstance(leaf, torchax.tensor.Tensor) for leaf in leaves)
    if is_foreign or not isinstance(f, jax.stages.Wrapped):
        return _host.call_jax(f, args, kwargs, name, override_hash)
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    _, structure = _trees.flatten_fast(tree, f"an argument of {_label(f)}")
    values = (spec, structure, _trees.exact(others))
    names, donors = _offered(f, leaves, spec, tree, override_hash, values)
    donated = to_donate(leaves, donors, names, request)
    # torch_xla compares the values that are not tensors, and the keys of dictionaries, by `==`.
    results = _host.call_jax(f, args, kwargs, name, (override_hash or id(f), values))
    if donated:
        outputs = jax.tree.leaves(results)
        pairs = _host.paired([leaves[index] for index in donated], outputs)
        into = {donated[donor]: outputs[output] for donor, output in pairs}
        give(leaves, donated, names, request, into)
    return results


# The names of the leaves of a call's arguments, and the numbers of the tensors that its function donates.
_Offered = tuple[_trees.Places, list[int]]


def _check_bits(leaves: Sequence[Any], names: _trees.Names) -> None:
    # torch_xla would find the difference when it lowers the step, and lose all pending values.
    jax, _ = _host.import_jax()
    for index, leaf in enumerate(leaves):
        dtype = _dtype(leaf.dtype) if isinstance(leaf, torch.Tensor) else None
        if dtype is not None and jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                f"{names.name(index)} is {_trees.dtype_and_shape(leaf)}, but JAX works with 32 bits. Call "
                f"jax.config.update('jax_enable_x64', True) first, or cast the tensor. {see('call_jax')}"
            )


def _dtype(dtype: torch.dtype) -> Any:
    _, torchax = _host.import_jax()
    return torchax.ops.mappings.t2j_dtype(dtype)


def _label(f: Any) -> str:
    return str(getattr(f, "__name__", type(f).__name__))


def _names(f: Callable[..., Any], tree: Any) -> _trees.Places:
    """``args[0]['w'] of update`` for each leaf."""
    jax, _ = _host.import_jax()
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return _trees.Places(
        [(f"{('args', 'kwargs')[path[0].idx]}{jax.tree_util.keystr(path[1:])} of {_label(f)}",) for path in paths]
    )


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
        # Static arguments are missing there. The jaxpr of a function that calls f names the donated arguments.
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
            f"donates. Remove inline=True. Nothing was donated. {see('call_jax')}"
        )
    place = {id(variable): index for variable, index in zip(program.invars, arrays)}
    return sorted(
        place[id(variable)]
        for equation in program.eqns
        for variable, donated in zip(equation.invars, equation.params.get("donated_invars", ()))
        if donated and id(variable) in place
    )


# torch_xla caches the computations of a function, or of the hash that replaces it, in the same way.
_by_function: weakref.WeakKeyDictionary[Callable[..., Any], dict[Any, _Offered]] = weakref.WeakKeyDictionary()
_by_hash: dict[Any, dict[Any, _Offered]] = {}


def _offered(
    f: Callable[..., Any], leaves: Sequence[Any], spec: Any, tree: Any, override_hash: Any, values: Hashable
) -> _Offered:
    donation = _host.jit_donation(f) if override_hash else None
    if donation is None:
        known = _by_function.setdefault(f, {})
    else:
        # The hash identifies only the computation. Another function with this hash may donate other arguments.
        known = _by_hash.setdefault((override_hash, _label(f), donation), {})
    arrays = tuple((leaf.shape, leaf.dtype) for leaf in leaves if isinstance(leaf, torch.Tensor))
    found = known.get((arrays, values))
    if found is None:
        names = _names(f, tree)
        donors = [index for index in _donated(f, leaves, spec) if isinstance(leaves[index], torch.Tensor)]
        if donors:
            _check_bits(leaves, names)
        found = known[arrays, values] = names, donors
    return found
