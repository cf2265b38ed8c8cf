"""gradient_accumulation: torch_xla's loop, whose train step may call donate_buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _config, _host, _marks, _trace, _trees
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._loops.donations import chosen_arguments, loop_donations, refuse_eager_mode

_ARGUMENTS = ("iterable_tensors", "carried_tensors")


def gradient_accumulation(
    train_step: Callable[..., Any],
    iterable_tensors: tuple[torch.Tensor, ...],
    model: torch.nn.Module,
    *carried_tensors: torch.Tensor,
    donate: str | Sequence[str] = (),
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> Any:
    """`torch_xla.experimental.gradient_accumulation.gradient_accumulation`, which can donate its arguments.

    Inside ``train_step``, ``donate_buffer(t)`` of an unchanged argument donates the corresponding carried tensor, or
    the whole iterable tensor. The memory of a carried tensor can go to its final value. torch_xla adds to existing
    gradients in place, and so donates their buffers automatically. The carried tensors return in their order
    (torch_xla 2.9.0 reverses all except the first).

    Args:
        train_step: ``(*slices, *carried) -> loss`` or ``(loss, *carried)``. The loop runs its backward pass.
        iterable_tensors: tensors of the same leading dimension, over which the loop iterates.
        model: the module whose gradients the loop accumulates, in the ``grad`` of its parameters.
        *carried_tensors: tensors that one iteration passes to the next.
        donate: ``"iterable_tensors"``, ``"carried_tensors"`` or both, to donate all of these tensors.
        strict: what an unusable donation does, as for `donate_buffer`.
        stacklevel: the line of the donation, as for `donate_buffer`.

    Returns:
        The mean loss, a float32 scalar. With carried tensors a tuple of the loss and these tensors.

    Raises:
        TypeError: ``donate``, ``strict`` or ``stacklevel`` has another type, a carried value is not a tensor, or the
            loss is not float32.
        ValueError: ``donate`` names another argument, the tensors do not fit torch_xla's function, or two carried
            tensors share a buffer.
        DonationError: a donated tensor is pending, a tensor donated in the step is not one of its arguments, the step
            makes torch_xla run something (``torch_xla.sync()``, ``print``, ``.item()``), torch_xla is in eager mode, or
            the call is inside a pure function.
    """
    request = _marks.DonationRequest.make(strict, stacklevel)
    chosen = chosen_arguments(donate, _ARGUMENTS)
    if _config.IS_OFF:
        return _unrolled(train_step, iterable_tensors, carried_tensors)
    by = _trace.current_watcher.value
    if by is not None:
        raise by.refuse("calls gradient_accumulation, which computes its arguments while it is traced", "Use scan")
    refuse_eager_mode("gradient_accumulation")
    _refuse_twice(carried_tensors)
    found: dict[int, _marks.DonationRequest | None] = {}

    def step(*traced: torch.Tensor) -> Any:
        body = _marks.LoopBody("gradient_accumulation", traced)
        before = _C.runs_begun()
        with _marks.current_body.replaced(body):
            result = train_step(*traced)
        _refuse_runs(_C.runs_begun() - before)
        loss, *rest = result if carried_tensors else (result,)
        _refuse_other_precision(loss)
        found.update(body.requests)
        return (loss, *rest) if carried_tensors else loss

    with _gradients_aside(model):
        result = _host.accumulate(step, iterable_tensors, model, carried_tensors)
        given = zip(_ARGUMENTS, (iterable_tensors, carried_tensors))
        arguments = [(name, tensors, _trees.IndexNames()) for name, tensors in given]
        _marks.mark_all(loop_donations(arguments, chosen, request, found))
    return result


def _unrolled(train_step: Callable[..., Any], iterable: Sequence[torch.Tensor], carried: Sequence[torch.Tensor]) -> Any:
    """The same computation while the package is switched off. torch_xla's function returns another order."""
    has_carried, count = bool(carried), len(iterable[0])
    total = torch.zeros((), device=iterable[0].device)
    for index in range(count):
        with _marks.inside_call.replaced(True):
            result = train_step(*(tensor[index] for tensor in iterable), *carried)
        loss, *rest = result if has_carried else (result,)
        carried = [tensor.detach() for tensor in rest]
        (loss / count).backward()
        total = total + loss.detach() / count
    return (total, *carried) if has_carried else total


def _refuse_runs(count: int) -> None:
    """Raises DonationError if the step has made torch_xla run something. The loop would take the result for a constant.

    This check comes after the run, because a stopped run would lose other pending values.
    """
    if count:
        raise DonationError(
            "the train step has made torch_xla run something (torch_xla.sync(), print of a tensor, .item() or "
            "torch.compile), whose results would be constants in the loop. Remove that from the step, and carry the "
            f"tensors to be printed. {see('gradient_accumulation')}"
        )


def _refuse_other_precision(loss: Any) -> None:
    """Raises TypeError for a loss that is not float32. XLA would refuse the whole step with all pending work."""
    if isinstance(loss, torch.Tensor) and loss.dtype != torch.float32:
        raise TypeError(
            f"the train step's loss is {_trees.dtype_and_shape(loss)}, but torch_xla's loop adds up float32 losses. "
            f"Return loss.float(). {see('gradient_accumulation')}"
        )


@contextlib.contextmanager
def _gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """Hides existing gradients from the loop. Afterwards adds the new ones in place. If the loop fails, they stay."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        found = [parameter.grad for parameter, _ in before]
        for parameter, gradient in before:
            parameter.grad = gradient
    for (parameter, gradient), new in zip(before, found):
        if gradient is None:
            parameter.grad = new
        elif new is not None:
            gradient.add_(new)


def _refuse_twice(carried: Sequence[torch.Tensor]) -> None:
    """Raises ValueError for carried tensors of one buffer. torch_xla's loop has one place for both."""
    places: dict[int, int] = {}
    for index, tensor in enumerate(carried):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"carried_tensors[{index}] is of type {type(tensor).__name__}, not a tensor. Pass a tensor, or close "
                f"over the value in the step. {see('gradient_accumulation')}"
            )
        for key in _C.identity(tensor):
            first = places.setdefault(key, index) if key else index
            if first != index:
                raise ValueError(
                    f"carried_tensors[{index}] has the same buffer as carried_tensors[{first}], but each of them gets "
                    f"a new value. Pass a .clone() as one of them. {see('gradient_accumulation')}"
                )
