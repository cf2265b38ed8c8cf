"""donate_buffer, cancel_donation and is_donated."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from torch_xla_donate import _C, _config, _trees
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._frames import call_site
from torch_xla_donate._marks.batch import Donation, mark, mark_all
from torch_xla_donate._marks.into import outputs_in_order
from torch_xla_donate._marks.refusals import describe, refusal
from torch_xla_donate._marks.request import DonationRequest, check_options, prepare
from torch_xla_donate._marks.scope import current_body, refuse_in_trace


def donate_buffer(
    tensors: Any, *, into: Any = None, strict: _config.Strict = None, stacklevel: int = 1
) -> contextlib.AbstractContextManager[object]:
    """Marks the buffers of ``tensors`` as donors of the next step that reads them.

    At that step (``torch_xla.sync()`` or ``xm.mark_step()``) XLA may write an output into each buffer. A later use of
    the tensor raises `DonatedBufferError`. If XLA finds no output of the same number of bytes per device, the tensor
    stays alive and a `DonationWarning` reports it. In both cases the mark ends, and the outputs are not marked. Steps
    that do not read the buffer, and partial syncs (``print``, ``.item()``, ``.cpu()``), leave the mark pending.

    Args:
        tensors: a materialised XLA tensor of any shape and dtype, a pytree of them (``None`` leaves are skipped),
            an ``nn.Module`` (its parameters and buffers) or an optimizer (parameters and state), also inside a pytree.
            All tensors are marked, or none. Of several marks of a tensor the strictest and the last ``into`` count.
        into: the tensor that should reuse the buffer, or a pytree of them with as many leaves as ``tensors``, with
            ``None`` for a leaf without a target. Each must be pending and have the same shape, dtype and sharding.
            Without it the buffer goes to the output computed from the tensor, if there is one of its size. The pair
            is certain only if every output of that size is a target; `donation_report` shows whether XLA kept it.
        strict: what an unusable donation does at the end of the step: ``"error"`` or True raises `DonationError`,
            ``"warn"`` or False warns, ``"off"`` only enters it into the report. Default: the environment variable
            ``TORCH_XLA_DONATE_STRICT``, or ``"warn"``.
        stacklevel: which line messages and the report show: 1 for the line of this call, 2 for the line that calls the
            function with this call, and so on, as for `warnings.warn`.

    Returns:
        A context manager that cancels these marks if its block raises, as in ``with donate_buffer(state):``. You may
        ignore it.

    Raises:
        TypeError: a leaf of ``tensors`` or ``into`` is not a tensor, or ``strict`` or ``stacklevel`` has another type.
        ValueError: a leaf is not an XLA tensor, ``into`` does not fit or is given inside a loop's body, ``strict`` is
            unknown, or ``stacklevel`` is not positive.
        DonationError: a leaf is pending (call ``torch_xla.sync()`` first), torch_xla shares its buffer between tensors
            (cached constants, the RNG seed), an output in ``into`` has its value, or a pure function calls this.
        DonatedBufferError: a step has consumed a leaf.
        RuntimeError: a leaf is a placeholder, outside `lower`.
    """
    check_options(strict, stacklevel)
    if _config.IS_OFF:
        return _only_checked(tensors, into)
    where = call_site(stacklevel)
    body = current_body.value
    if body is not None:
        request = DonationRequest(where, strict)
        donations = [Donation(name, leaf, request) for name, leaf in _trees.named_leaves(tensors, "tensors")]
        stands_for = next((given.name for given in donations if body.argument(given.tensor) is not None), None)
        if stands_for is not None and into is not None:
            raise ValueError(
                f"into is given for {stands_for}, which stands for an argument of {body.loop} in its body, where the "
                f"outputs of the step are unknown. Call donate_buffer with into= after {body.loop}, on its argument "
                f"and its result. Nothing was marked. {see('into')}"
            )
        if stands_for is not None:
            mark_all(donations)
            return contextlib.nullcontext()  # an error ends the trace of the body and its requests
    refuse_in_trace("donate_buffer")
    effect = _WARN if prepare(where) and strict is None else _config.strictness(strict)
    if into is None:
        # The common cases need no pytree, unless a leaf is a container.
        kind = type(tensors)
        if kind is list or kind is tuple:
            marks = _C.mark(tensors, where, effect, _ITEMS, {})
        elif isinstance(tensors, torch.Tensor):
            marks = _C.mark((tensors,), where, effect, _SINGLE, {})
        else:
            marks = None
        if isinstance(marks, _C.Call):
            return marks
    leaves, names = ([tensors], _SINGLE) if isinstance(tensors, torch.Tensor) else _trees.flatten(tensors, "tensors")
    outputs = [] if into is None else outputs_in_order(names, into, len(leaves))
    return mark(leaves, names, outputs, DonationRequest(where, strict), "tensors")


_WARN = _config.Strictness.WARN  # for each mark: an enum finds its members slowly
_ITEMS = _trees.IndexNames()
_SINGLE = _trees.Places([()])


def _only_checked(tensors: Any, into: Any) -> contextlib.AbstractContextManager[object]:
    """`donate_buffer` while the package is switched off."""
    for name, leaf in _trees.named_leaves(tensors, "tensors"):
        if not isinstance(leaf, torch.Tensor):
            raise refusal(leaf, "not_tensor", name)
        if leaf.device.type != "xla" or leaf.layout != torch.strided:
            raise refusal(leaf, "not_xla", name)
    if into is not None:
        leaves, names = _trees.flatten(tensors, "tensors")
        outputs_in_order(names, into, len(leaves))
    return contextlib.nullcontext()


def cancel_donation(tensors: Any) -> None:
    """Cancels the marks of ``tensors`` that no step has read yet.

    Inside a loop's body, an argument of the body stands for that of the loop, as it does for `donate_buffer`.

    Args:
        tensors: as for `donate_buffer`. Tensors without a mark are skipped.

    Raises:
        TypeError: a leaf is not a tensor.
        DonationError: a step has consumed a leaf, or a call of a compiled function on another thread is about to. No
            mark is cancelled then.
    """
    body = current_body.value
    arguments: list[int] = []
    found: list[tuple[str, torch.Tensor]] = []
    for name, tensor in _trees.named_leaves(tensors, "tensors"):
        if not isinstance(tensor, torch.Tensor):
            raise refusal(tensor, "not_tensor", name)
        argument = body.find(tensor) if body is not None else None
        if argument is not None:
            arguments.append(argument)
        elif _C.state(tensor) in ("donated", "marked"):
            found.append((name, tensor))
    if found:
        refuse_in_trace("cancel_donation")
    taken = _C.cancel([tensor for _, tensor in found])  # a step on another thread may have begun meanwhile
    if taken is not None:
        name, tensor = found[taken]
        raise DonationError(
            f"{name} is {describe(tensor)}, and a step has consumed it. Cancel a donation before the step. "
            f"No mark was cancelled. {see('cancel_donation')}"
        )
    if body is not None:
        body.requests.update(dict.fromkeys(arguments))  # None: cancelled


def is_donated(t: torch.Tensor) -> bool:
    """Returns True once a step has consumed ``t``'s buffer. Never waits for the device.

    During the first run of a graph it is not yet known whether XLA uses the buffer. The result is True then, and
    becomes False if the donation is unusable. A view without a value is donated if a step has consumed its base.

    Args:
        t: any tensor. A tensor on another device than XLA's is never donated.

    Raises:
        TypeError: ``t`` is not a tensor.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(
            f"t is of type {type(t).__name__}, not a tensor. Pass one tensor at a time. {see('cancel_donation')}"
        )
    return _C.is_donated(t)
