"""gradient_accumulation: torch_xla's, with donate_buffer usable inside of the train step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _bodies, _donate, _errors, _host, _leaves
from torch_xla_donate._errors import DonationError

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
        TypeError: ``donate`` is no name, a carried one is not a tensor, or the loss is not float32.
        ValueError: ``donate`` names something else, the tensors do not fit torch_xla's function, or two carried ones
            have the same buffer.
        DonationError: a donated tensor is pending, a tensor donated in the step is none of its arguments, the step
            makes torch_xla run something (``torch_xla.sync()``, ``print``, ``.item()``), torch_xla is in eager mode, or
            this is inside of a function that is declared pure.
    """
    by = _bodies.watcher()
    if by is not None:
        raise by.refuse("calls gradient_accumulation, which computes its arguments while it is traced", "Use scan")
    _bodies.refuse_eager_mode("gradient_accumulation")
    where = _donate.call_site()
    chosen = _bodies.chosen(donate, _ARGUMENTS)
    arguments = {
        f"{argument}[{index}]": tensor
        for argument, tensors in zip(_ARGUMENTS, (iterable_tensors, carried_tensors))
        for index, tensor in enumerate(tensors)
    }
    _refuse_twice(carried_tensors)
    wanted = {name: _bodies.Wish(where, strict) for name in arguments if name.partition("[")[0] in chosen}
    found: dict[str, _bodies.Wish | None] = {}

    def step(*traced: torch.Tensor) -> Any:
        body = _bodies.Body("gradient_accumulation", {id(leaf): name for leaf, name in zip(traced, arguments)})
        with _bodies.tracing(body), _runs_refused():
            result = train_step(*traced)
        _refuse_other_precision(result[0] if carried_tensors else result)
        found.update(body.wishes)
        return result

    result = _host.accumulate(step, iterable_tensors, model, carried_tensors)
    wishes, cancelled = _bodies.settle(wanted, found, strict)
    _donate.cancel_donation([arguments[name] for name in cancelled])
    _donate.mark_named({name: arguments[name] for name in wishes}, wishes)
    return result


@contextlib.contextmanager
def _runs_refused() -> Iterator[None]:
    """DonationError for a step that makes torch_xla run something: the loop would take what came out for a constant."""
    try:
        with _host.runs_refused():
            yield
    except RuntimeError as error:
        if not _host.is_refused_execution(error):
            raise
        where = _errors.line_of(error)
        raise DonationError(
            f"the train step makes torch_xla run something at {where}, as torch_xla.sync(), print "
            "of a tensor, .item() and functions of torch.compile do. Its results would be the same in every iteration "
            "of the loop, and have no gradients. Take that out of the step; what is to be printed can be carried."
        ) from error


def _refuse_other_precision(loss: Any) -> None:
    """TypeError for a loss that is not float32: XLA would refuse the whole step, and the work of others with it."""
    if isinstance(loss, torch.Tensor) and loss.dtype != torch.float32:
        raise TypeError(
            f"the train step's loss is {_leaves.array(loss)}; torch_xla's loop adds up losses of float32. Return "
            "loss.float()."
        )


def _refuse_twice(carried: Sequence[torch.Tensor]) -> None:
    """ValueError for carried tensors of one buffer: torch_xla's loop has one place for both, and loses the first."""
    places: dict[int, int] = {}
    for index, tensor in enumerate(carried):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"carried_tensors[{index}] is of type {type(tensor).__name__}; only tensors are carried.")
        for key in _C.identity(_leaves.without_wrapper(tensor)):
            first = places.setdefault(key, index) if key else index
            if first != index:
                raise ValueError(
                    f"carried_tensors[{index}] has the same buffer as carried_tensors[{first}]: it was passed twice, "
                    "and each is to become a value of its own. Pass a .clone() as one of them."
                )
