"""gradient_accumulation: torch_xla's, with donate_buffer usable inside of the train step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla_donate import _bodies, _donate, _host

_ARGUMENTS = ("iterable_tensors", "carried_tensors")


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: tuple[torch.Tensor, ...],
    model: torch.nn.Module,
    *carried_tensors: torch.Tensor,
    donate: str | Sequence[str] = (),
    strict: bool | None = None,
) -> Any:
    """`torch_xla.experimental.gradient_accumulation.gradient_accumulation`, which can give up its arguments' buffers.

    Inside of ``train_step``, ``donate_buffer(t)`` of an argument as it came in donates the carried tensor, or the whole
    of the iterable tensor, that it stands for: the memory of a carried tensor can go to its final value. Gradients
    that are there already are added to in place, so torch_xla donates their buffers by itself. Carried tensors come
    back in the order in which they went in, however many (torch_xla 2.9.0 reverses all but the first).

    Args:
        train_step: ``(*slices, *carried) -> loss`` or ``(loss, *carried)``; its backward pass is run by the loop.
        iterable_tensors: tensors of the same leading dimension, over which the loop goes.
        model: the module whose gradients are accumulated, in the ``grad`` of its parameters.
        *carried_tensors: what goes from one iteration to the next.
        donate: ``"iterable_tensors"``, ``"carried_tensors"`` or both: all of them, without a word in ``train_step``.
        strict: whether a donation that could not be used raises. Default: ``TORCH_XLA_DONATE_STRICT``.

    Returns:
        The mean loss; followed by the carried tensors, if there are any.

    Raises:
        ValueError: ``donate`` names something else, or the tensors do not fit torch_xla's function.
        DonationError: a donated tensor is pending, or a tensor donated in the step is none of its arguments.
    """
    where = _donate.call_site()
    chosen = _bodies.chosen(donate, _ARGUMENTS)
    arguments = {
        f"{argument}[{index}]": tensor
        for argument, tensors in zip(_ARGUMENTS, (iterable_tensors, carried_tensors))
        for index, tensor in enumerate(tensors)
    }
    wishes = {name: where for name in arguments if name.partition("[")[0] in chosen}

    def step(*traced: torch.Tensor) -> Any:
        body = _bodies.Body("gradient_accumulation", {id(leaf): name for leaf, name in zip(traced, arguments)})
        with _bodies.tracing(body):
            result = train_step(*traced)
        wishes.update(body.wishes)
        return result

    result = _host.accumulate(step, iterable_tensors, model, carried_tensors)
    _donate.mark_named({name: arguments[name] for name in wishes}, wishes, strict)
    return result
