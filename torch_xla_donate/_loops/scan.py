"""scan and scan_layers: torch_xla's loops, whose bodies may call donate_buffer."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import default_partition
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _config, _frames, _host, _marks, _trace, _trees
from torch_xla_donate._errors import see
from torch_xla_donate._loops.donations import call_stock, chosen_arguments, loop_donations, refuse_eager_mode

_ARGUMENTS = ("init", "xs")


class _Wrapped:
    """A body that notes its donations.

    Args:
        function: returns the body. It refers weakly to a pure body, because the cache must not keep the body alive.
    """

    def __init__(self, function: Callable[[], Callable[..., Any] | None]) -> None:
        self._find = function
        self.requests: dict[Any, dict[int, _marks.DonationRequest | None]] = {}  # by `_arrays` of the arguments

    def __call__(self, carry: Any, x: Any) -> Any:
        function = self._find()
        assert function is not None, "the caller of scan holds it"
        leaves = [leaf for tree, name in ((carry, "carry"), (x, "x")) for leaf in _trees.flatten_fast(tree, name)[0]]
        body = _marks.LoopBody("scan", leaves)
        with _marks.current_body.replaced(body):
            result = function(carry, x)
        self.requests[_arrays(carry, x)] = body.requests
        _trees.flatten_fast(result, "the result of fn")  # may raise
        if isinstance(result, tuple) and result:
            _refuse_another_order(carry, result[0])
        return result


def _refuse_another_order(carry: Any, new: Any) -> None:
    """Raises ValueError for a carry whose dictionaries have the keys in another order. torch_xla ignores the keys."""
    before, after = (_trees.with_places(tree)[1] for tree in (carry, new))
    if before != after and set(before) == set(after):
        order = ", ".join(map(_trees.Places(before).name, range(len(before))))
        raise ValueError(
            f"fn returns a carry whose leaves have another order than those of init: {order}. Write the dictionary "
            f"with the keys in that order. {see('scan')}"
        )


def _arrays(carry: Any, x: Any, rows: int = 0) -> Any:
    """The key of a body's trace, for one structure. rows: the number of leading dimensions of ``x`` to ignore."""
    arrays = [(tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(carry)]
    arrays += [(tuple(leaf.shape[rows:]), leaf.dtype) for leaf in pytree.tree_leaves(x)]
    return tuple(arrays)


# torch_xla keeps the trace of a pure body by the function's identity and does not trace it again. The requests of the
# first trace hold for all calls. It compares structures by `==`, so each structure has a separate wrapper.
_pure: weakref.WeakKeyDictionary[Callable[..., Any], dict[Hashable, _Wrapped]] = weakref.WeakKeyDictionary()


def _remembered(fn: Callable[..., Any], structures: Hashable) -> _Wrapped:
    """The wrapper of a pure body, one for each structure. Raises TypeError for a body that cannot be a weak key."""
    try:
        known = _pure.setdefault(fn, {})
        found = known.get(structures)
        if found is None:
            found = known[structures] = _Wrapped(weakref.ref(fn))
    except TypeError as error:
        raise TypeError(
            f"fn is of type {type(fn).__name__}, so the trace of a pure body cannot be kept for it: {error}. Pass the "
            f"same function at every call, one that calls it, or omit is_fn_pure. {see('scan')}"
        ) from None
    return found


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_fn_pure: bool = False,
    *,
    donate: str | Sequence[str] = (),
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> tuple[Any, Any]:
    """`torch_xla.experimental.scan.scan`, which can donate the buffers of ``init`` and ``xs`` to the step.

    Inside ``fn``, ``donate_buffer(leaf)`` of an unchanged leaf of ``carry`` or ``x`` donates the corresponding leaf of
    ``init`` or ``xs``. Its memory can go to the final carry, or to a stacked output of the same bytes. The leaf must be
    materialised. Tensors that the backward scan reads are not donated; a `DonationWarning` reports them.

    Args:
        fn: ``(carry, x) -> (carry, y)``, all pytrees of tensors.
        init: the first carry.
        xs: a pytree of tensors of the same leading dimension, over which the loop iterates.
        partition_fn: divides the forward from the backward graph.
        is_fn_pure: whether ``fn`` is traced only once. The donations of that trace hold for every call.
        donate: ``"init"``, ``"xs"`` or both, to donate all leaves of the argument.
        strict: what an unusable donation does, as for `donate_buffer`.
        stacklevel: the line of the donation, as for `donate_buffer`.

    Returns:
        The final carry, and the outputs ``y`` stacked along a new leading dimension.

    Raises:
        ValueError: ``donate`` names another argument, ``fn`` cannot be called or returns the carry's dictionaries in
            another order, or the tensors are on several devices.
        TypeError: ``donate``, ``strict`` or ``stacklevel`` has another type, or ``fn`` is pure but cannot be hashed or
            weakly referenced.
        NotImplementedError: it is called in the body of another scan.
        DonationError: a donated leaf is pending or was made in the body, torch_xla is in eager mode, or, with
            ``strict``, autograd has saved a donated leaf.
    """
    from torch_xla.experimental.scan import scan as host_scan

    request = _marks.DonationRequest.make(strict, stacklevel)
    if not callable(fn):
        raise ValueError(
            f"fn is {fn!r}, which cannot be called. Pass the body of the loop, a function of (carry, x). {see('scan')}"
        )
    chosen = chosen_arguments(donate, _ARGUMENTS)
    if _config.IS_OFF:
        return call_stock(host_scan, fn, init, xs, partition_fn=partition_fn, is_fn_pure=is_fn_pure)  # type: ignore[no-any-return]
    refuse_eager_mode("scan")
    _refuse_inside_a_scan()
    flat = [_trees.flatten_fast(tree, name) for name, tree in zip(_ARGUMENTS, (init, xs))]
    structures = tuple(structure for _, structure in flat)
    body = _remembered(fn, structures) if is_fn_pure else _Wrapped(lambda: fn)
    result: tuple[Any, Any]
    device = _the_device([leaf for leaves, _ in flat for leaf in leaves])
    handled = sys.exc_info()[1]
    with _host.on_device(device), _host.one_scan():
        try:
            result = _trace.as_one(host_scan, body, init, xs, partition_fn=partition_fn, is_fn_pure=is_fn_pure)
        except BaseException as error:
            _frames.forget_values(error, handled)
            raise
    arguments = [(name, *_trees.flatten(tree, name)) for name, tree in zip(_ARGUMENTS, (init, xs))]
    found = body.requests.get(_arrays(init, xs, rows=1), {})
    donations = loop_donations(arguments, chosen, request, found)
    _donate_leaves(donations, result)
    return result


def _refuse_inside_a_scan() -> None:
    body = _marks.current_body.value
    if body is not None and body.loop == "scan":
        raise NotImplementedError(
            "scan or scan_layers is called in the body of a scan, which torch_xla cannot trace (2.9.0). Write the "
            f"inner loop as a Python loop, or make one loop of both. {see('scan')}"
        )


def _the_device(leaves: list[Any]) -> list[int]:
    """The device of the tensors, if any. Raises ValueError for several, for which torch_xla ends the process."""
    devices = _C.devices(leaves)
    if len(devices) > 1:
        raise ValueError(
            f"init and xs have tensors on xla:{devices[0]} and xla:{devices[1]}, but a loop runs on one device. Move "
            f"them to one device. {see('scan')}"
        )
    return devices


def _donate_leaves(donations: list[_marks.Donation], result: Any) -> None:
    by = _trace.current_watcher.value
    if by is not None and _marks.current_body.value is None:
        # Donated arguments of the function are marked already. Another mark would wait for a step.
        donations = [
            given
            for given in donations
            if _C.state(given.tensor) != "marked" and _C.identity(given.tensor)[0] not in by.donated_copies
        ]
        for given in donations:
            if _C.state(given.tensor) == "materialized":
                raise by.refuse(f"donates {given.name}, a tensor from outside, to a scan", "Name it in donate_argnums")
    read = _read_by_backward(result) if donations and _marks.current_body.value is None else set()
    saved = [given for given in donations if not read.isdisjoint(_C.identity(given.tensor))]
    if saved:
        _marks.cancel_donation([given.tensor for given in saved])  # an earlier mark would also donate it
        _marks.refuse_all(saved, _C.Reason("saved_for_backward"))
    _marks.mark_all([given for given in donations if read.isdisjoint(_C.identity(given.tensor))])


def _read_by_backward(result: Any) -> set[int]:
    """Identities of the tensors and buffers that the backward scan will read."""
    read: set[int] = set()
    for node in {leaf.grad_fn for leaf in pytree.tree_leaves(result) if getattr(leaf, "grad_fn", None) is not None}:
        for tensor in _host.read_by_backward_scan(node):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "xla":
                read.update(_C.identity(tensor))
    return read - {0}


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_layer_pure: bool = False,
    *,
    donate: bool = False,
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> Any:
    """`torch_xla.experimental.scan_layers.scan_layers`, which can donate the buffers of ``input_data`` to the step.

    The layers' ``forward`` may call ``donate_buffer`` on its input. ``donate`` has the same effect.

    Args:
        layers: modules of the same structure, applied one after another.
        input_data: the input of the first layer, a pytree of tensors.
        partition_fn: divides the forward from the backward graph.
        is_layer_pure: whether the layer is traced only once.
        donate: whether ``input_data`` is donated.
        strict: what an unusable donation does, as for `donate_buffer`.
        stacklevel: the line of the donation, as for `donate_buffer`.

    Returns:
        The result of the last layer.

    Raises:
        TypeError: ``strict`` or ``stacklevel`` has another type.
        NotImplementedError, DonationError: as for `scan`.
    """
    _marks.DonationRequest.make(strict, stacklevel)
    layers = list(layers)  # torch_xla iterates over them twice
    if _config.IS_OFF:
        from torch_xla.experimental.scan_layers import scan_layers as host_scan_layers

        return call_stock(host_scan_layers, layers, input_data, partition_fn=partition_fn, is_layer_pure=is_layer_pure)
    by = _trace.current_watcher.value
    if by is not None:
        for layer in layers:
            for module in layer.modules():
                by.modules.note(module)
    _refuse_inside_a_scan()  # before torch_xla copies a layer
    ours = functools.partial(scan, donate="init" if donate else (), strict=strict, stacklevel=stacklevel)
    return _host.scan_layers(ours, layers, input_data, partition_fn=partition_fn, is_layer_pure=is_layer_pure)
