"""scan and scan_layers: torch_xla's, with donate_buffer usable inside of the body."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._functorch.partitioners import default_partition
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _bodies, _donate, _host, _leaves, _nested, _report

_ARGUMENTS = ("init", "xs")


class _Wrapped:
    """A body that notes what it donates.

    One for each function: torch_xla keeps the trace of a pure body by the function's identity, and does not trace it
    again; what the first trace has asked for holds then.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = weakref.ref(fn)  # whoever calls scan holds it; this object lives as long as the function
        self.wishes: dict[Any, dict[str, str]] = {}  # by the structure of the arguments
        self.loops: list[object] = []  # those inside of the function, as long as its traces may be run
        self._key: Any = None

    def _function(self) -> Callable[..., Any]:
        fn = self._fn()
        assert fn is not None
        return fn

    def prepare(self, init: Any, xs: Any) -> Any:
        self._key = (pytree.tree_structure(init), pytree.tree_structure(xs))
        return self._key

    def __call__(self, carry: Any, x: Any) -> Any:
        leaves: dict[int, str] = {}
        for argument, tree in zip(_ARGUMENTS, (carry, x)):
            found, names = _leaves.flatten(tree)
            for index, leaf in enumerate(found):
                leaves[id(leaf)] = _leaves.label(argument, names.name(index))
        body = _bodies.Body("scan", leaves)
        with _bodies.tracing(body):
            result = self._function()(carry, x)
        self.wishes[self._key] = body.wishes
        return result


_wrapped: weakref.WeakKeyDictionary[Callable[..., Any], _Wrapped] = weakref.WeakKeyDictionary()


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_fn_pure: bool = False,
    *,
    donate: str | Sequence[str] = (),
    strict: bool | None = None,
) -> tuple[Any, Any]:
    """`torch_xla.experimental.scan.scan`, which can give up the buffers of ``init`` and ``xs`` at the step.

    Inside of ``fn``, ``donate_buffer(leaf)`` of a leaf of ``carry`` or ``x`` as it came in donates the corresponding
    leaf of ``init`` or ``xs``: its memory can go to the final carry, or to a stacked output of the same bytes. It must
    be materialised. What autograd has saved for the backward scan is not donated; a `DonationWarning` says so.

    Args:
        fn: ``(carry, x) -> (carry, y)``, all pytrees of tensors.
        init: the first carry.
        xs: a pytree of tensors, all of the same leading dimension, over which the loop goes.
        partition_fn: divides the forward from the backward graph.
        is_fn_pure: whether ``fn`` is traced once only; what it has donated then is donated at every call.
        donate: ``"init"``, ``"xs"`` or both: all leaves of the argument, without a word in ``fn``.
        strict: whether a donation that could not be used raises. Default: ``TORCH_XLA_DONATE_STRICT``.

    Returns:
        The final carry, and the outputs ``y`` stacked along a new leading dimension.

    Raises:
        ValueError: ``donate`` names something else.
        DonationError: a donated leaf is pending, or a tensor donated in the body is none of its arguments.
    """
    from torch_xla.experimental.scan import scan as host_scan

    where = _donate.call_site()
    names = _bodies.chosen(donate, _ARGUMENTS)
    body = _wrapped.get(fn)
    if body is None or not is_fn_pure:
        body = _wrapped[fn] = _Wrapped(fn)
    key = body.prepare(init, xs)
    with _nested.allowed(body.loops):
        result = host_scan(body, init, xs, partition_fn=partition_fn, is_fn_pure=is_fn_pure)
    _keep_loops(result, body.loops)
    wishes = dict(body.wishes.get(key, {}))
    leaves: dict[str, torch.Tensor] = {}
    for argument, tree in zip(_ARGUMENTS, (init, xs)):
        found, paths = _leaves.flatten(tree)
        for index, leaf in enumerate(found):
            name = _leaves.label(argument, paths.name(index))
            leaves[name] = leaf
            if argument in names:
                wishes.setdefault(name, where)
    _donate_leaves({name: leaves[name] for name in wishes}, wishes, result, strict)
    return result


def _keep_loops(result: Any, loops: list[object]) -> None:
    """Lets the loops inside of a body live as long as autograd may run the body's backward graph."""
    for leaf in pytree.tree_leaves(result) if loops else ():
        node = getattr(leaf, "grad_fn", None)
        if node is not None:
            node.torch_xla_donate_loops = loops


def _donate_leaves(leaves: dict[str, torch.Tensor], wishes: dict[str, str], result: Any, strict: bool | None) -> None:
    outer = _bodies.current()
    if outer is not None:
        for name, leaf in leaves.items():
            outer.donate(leaf, wishes[name])
        return
    saved = _saved_by_autograd(result)
    free: dict[str, torch.Tensor] = {}
    for name, leaf in leaves.items():
        if _C.identity(leaf)[0] in saved:
            _report.warn_once(
                f"Some donated buffers were not usable: {_leaves.array(leaf)} {name} (donated at {wishes[name]}).\n"
                f"  {name}: autograd has saved it for the backward scan.\n"
                "  They stay readable. See docs/unusable.md.",
                wishes[name],
            )
        else:
            free[name] = leaf
    _donate.mark_named(free, wishes, strict)


def _saved_by_autograd(result: Any) -> set[int]:
    """Identities of the tensors that the backward scan will read."""
    saved: set[int] = set()
    for leaf in pytree.tree_leaves(result):
        node = getattr(leaf, "grad_fn", None)
        for tensor in getattr(node, "saved_tensors", None) or ():
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "xla":
                saved.add(_C.identity(tensor)[0])
    return saved


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: Any,
    partition_fn: Callable[..., Any] = default_partition,
    is_layer_pure: bool = False,
    *,
    donate: bool = False,
) -> Any:
    """`torch_xla.experimental.scan_layers.scan_layers`, which can give up the buffers of ``input_data`` at the step.

    The layers' ``forward`` may call ``donate_buffer`` on the input it was given; or ``donate`` does it from outside.

    Args:
        layers: modules of the same structure, applied one after another.
        input_data: what the first layer gets, a pytree of tensors.
        partition_fn: divides the forward from the backward graph.
        is_layer_pure: whether the layer is traced once only.
        donate: whether ``input_data`` is donated.

    Returns:
        What the last layer returns.

    Raises:
        DonationError: a donated leaf is pending, or a tensor donated in a layer is not the layer's input.
    """
    from torch_xla.experimental import scan_layers as host

    ours = functools.partial(scan, donate="init" if donate else ())
    with _host.replaced(host, "scan", ours):
        return host.scan_layers(layers, input_data, partition_fn=partition_fn, is_layer_pure=is_layer_pure)
