"""Marking: donate_buffer, cancel_donation, is_donated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _config, _frames, _report, _trees
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._marks.batch import Donation, mark_all
from torch_xla_donate._marks.into import pair_leaves, targets_in_order
from torch_xla_donate._marks.prepare import prepare
from torch_xla_donate._marks.refusals import describe, refusal
from torch_xla_donate._marks.request import DonationRequest
from torch_xla_donate._marks.traced_body import current_body


class Marks:
    """What `donate_buffer` returns: a context that takes the marks back if its block raises. Holds no tensor."""

    def __init__(self, call: _C.Call | None) -> None:
        self._call = call

    def __enter__(self) -> Marks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if kind is not None and self._call is not None:
            _C.cancel_marks(self._call)


def donate_buffer(tensors: Any, *, into: Any = None, strict: bool | None = None) -> Marks:
    """Gives the buffers of ``tensors`` to the next step that reads them.

    At that step (``torch_xla.sync()`` or ``xm.mark_step()``) XLA may write an output into each buffer. Afterwards
    the tensors can no longer be used: any use raises `DonatedBufferError`. A donor for which XLA finds no output
    of the same number of bytes per device stays alive and is told by a `DonationWarning`. Either way the mark is
    over: it holds for one step and does not pass on to the outputs. Steps that do not read the buffer, and partial
    syncs (``print``, ``.item()``, ``.cpu()``), leave it pending.

    Args:
        tensors: a materialised XLA tensor of any shape and dtype, a pytree of them (``None`` leaves are skipped),
            an ``nn.Module`` (its parameters and buffers) or an optimizer (parameters and state), also inside a pytree.
            All are marked, or none.
            Marking a tensor twice is the same as once.
        into: the tensor that should take the buffer over, or a pytree of them with as many leaves as ``tensors``
            (``None`` for a leaf without a wish). Each must be pending work of the same shape, dtype and sharding.
            Without it XLA pairs donors and outputs of the same size in their order, and where that crosses (a new
            moment goes to a parameter's buffer) it has to copy. With it the graph's parameters are put into the
            order that gives the pairs asked for. That succeeds where every output of that size is somebody's
            target; `donation_report` tells whether the pair was kept.
        strict: whether a donation that could not be used raises `DonationError` at the end of the step, instead of
            warning. Default: the environment variable ``TORCH_XLA_DONATE_STRICT``.

    Returns:
        A context manager, for marks that an error must not leave behind. ``with donate_buffer(state):`` takes the marks
        of these tensors back if the block raises; otherwise it changes nothing. It may be ignored.

    Raises:
        TypeError: a leaf is not a tensor, or ``strict`` is no bool.
        ValueError: a leaf is not an XLA tensor, or ``into`` does not fit, or is given inside of a loop's body.
        DonationError: a leaf is pending (call ``torch_xla.sync()`` first), or shares a buffer that torch_xla keeps
            for everybody (cached constants, the RNG seed).
        DonatedBufferError: a leaf has been donated already.
    """
    _config.check_strict(strict)
    where = _frames.call_site()
    body = current_body()
    if body is not None:
        donations = _donations(tensors, DonationRequest(where, strict))
        stands_for = next((given.name for given in donations if body.argument(given.tensor) is not None), None)
        if stands_for is not None and into is not None:
            raise ValueError(
                f"into is given for {stands_for}, which stands for an argument of {body.loop} in its body, where the "
                f"outputs of the step are unknown. Call donate_buffer with into= after {body.loop}, on its argument "
                f"and its result. Nothing was marked. {see('loops')}"
            )
        if stands_for is not None:
            mark_all(donations)
            return Marks(None)  # an error ends the trace of the body, and the marks with it
    prepare(where)
    if strict is None:
        strict = _config.strict_by_default()
    leaves: Sequence[Any]
    names: _trees.Names
    if isinstance(tensors, torch.Tensor):
        leaves, names = [tensors], _trees.Unnamed()
    elif type(tensors) in (list, tuple):
        # The common case needs no pytree, unless a leaf turns out to be a container.
        leaves, names = tensors, _trees.IndexNames()
    else:
        leaves, names = _trees.flatten(tensors)
    if _report.open_pairs():
        _report.resolve_pairs(wait=False)
    paired: _report.Paired | None = None
    targets: dict[int, torch.Tensor] = {}
    if into is not None:
        leaves, places = _trees.flatten(tensors)
        paired, targets = pair_leaves(leaves, places, targets_in_order(places, into, len(leaves)), where)
        names = paired

    marked = _C.mark(leaves, where, strict, names, targets)
    if marked.refusal is not None and isinstance(names, _trees.IndexNames):
        leaves, names = _trees.flatten(tensors)
        marked = _C.mark(leaves, where, strict, names, targets)
    if marked.refusal is not None and marked.refusal.obstacle == "not_xla":
        leaves = [_trees.without_wrapper(leaf) for leaf in leaves]
        marked = _C.mark(leaves, where, strict, names, targets)
    if (why := marked.refusal) is not None:
        raise refusal(leaves[why.leaf], why.obstacle, _trees.qualified_name("tensors", names.name(why.leaf)))
    if paired is not None:
        _report.watch_pairs(paired, where)
    return Marks(marked)


def _donations(tensors: Any, request: DonationRequest) -> list[Donation]:
    leaves, names = _trees.flatten(tensors)
    return [
        Donation(_trees.qualified_name("tensors", names.name(index)), _trees.without_wrapper(leaf), request)
        for index, leaf in enumerate(leaves)
        if leaf is not None
    ]


def cancel_donation(tensors: Any) -> None:
    """Takes back the marks of ``tensors`` that no step has read yet.

    Inside of a loop's body, an argument of the body stands for that of the loop, as it does for `donate_buffer`.

    Args:
        tensors: as for `donate_buffer`. Tensors without a mark are passed over.

    Raises:
        TypeError: a leaf is not a tensor.
        DonationError: a leaf has been donated already; no mark is taken back then.
    """
    body = current_body()
    arguments: list[int] = []
    found: list[torch.Tensor] = []
    leaves, names = _trees.flatten(tensors)
    for index, leaf in enumerate(leaves):
        if leaf is None:
            continue
        tensor = _trees.without_wrapper(leaf)
        if not isinstance(tensor, torch.Tensor):
            raise refusal(tensor, "not_tensor", _trees.qualified_name("tensors", names.name(index)))
        argument = body.find(tensor) if body is not None else None
        if argument is not None:
            arguments.append(argument)
            continue
        state = _C.state(tensor)
        if state == "donated":
            name = _trees.qualified_name("tensors", names.name(index))
            raise DonationError(
                f"{name} is {describe(tensor)}, and a step has consumed it. Cancel a donation before the step. "
                f"No mark was cancelled. {see('refused')}"
            )
        if state == "marked":
            found.append(tensor)
    _C.cancel(found)
    if body is not None:
        body.cancel(arguments)


def is_donated(t: torch.Tensor) -> bool:
    """True once a step has consumed ``t``'s buffer. Never waits for the device.

    While the very first run of a graph is in flight it is not known yet whether XLA could use the buffer; the answer
    is True then, and turns False if the donation proves unusable. A view is donated if it can no longer be computed,
    as a step has consumed its base; one that has a value is not.

    Args:
        t: any tensor; one that is not on an XLA device is never donated.

    Raises:
        TypeError: ``t`` is not a tensor.
    """
    tensor = _trees.without_wrapper(t)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"t is of type {type(t).__name__}, not a tensor. Pass one tensor at a time. {see('refused')}")
    return _C.is_donated(tensor)
