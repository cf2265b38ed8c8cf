"""gradient_accumulation: torch_xla's loop, whose train step may call donate_buffer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_xla_donate import _C, _config, _host, _marks, _trace, _trees
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._loops.donations import chosen_arguments, loop_donations, refuse_eager_mode

_ARGUMENTS = ("iterable_tensors", "carried_tensors")
_not_compiled = functools.partial(
    torch.compiler.disable, reason="the train step of gradient_accumulation does not compile: leave fullgraph=True out"
)


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
            loss is not a float32 scalar.
        ValueError: ``donate`` names another argument, the tensors do not fit torch_xla's function, a carried tensor
            shares its buffer with another one, one of ``model`` or one that the step reads, the step does not read it
            or updates a tensor from outside in place, its results do not fit, or a tensor not of ``model`` would get a
            gradient.
        DonationError: a donated tensor is pending, the step makes torch_xla run something (``torch_xla.sync()``,
            ``print``, ``.item()``), torch_xla is in eager mode, or the call is inside a pure function.
    """
    request = _marks.DonationRequest.make(strict, stacklevel)
    chosen = chosen_arguments(donate, _ARGUMENTS)
    if _config.IS_OFF:
        return _unrolled(train_step, iterable_tensors, carried_tensors)
    by = _trace.current_watcher.value
    if by is not None:
        raise by.refuse("calls gradient_accumulation, which computes its arguments while it is traced", "Use scan")
    refuse_eager_mode("gradient_accumulation")
    _refuse_twice(carried_tensors, model)
    found: dict[int, _marks.DonationRequest | None] = {}
    unused = _Unused()

    def step(*traced: torch.Tensor) -> Any:
        slices, carried = traced[: len(iterable_tensors)], traced[len(iterable_tensors) :]
        before = _C.runs_begun()
        outside = _Outside(model, slices)
        with _stand_ins(carried) as (arguments, results):
            body = _marks.LoopBody("gradient_accumulation", [*slices, *arguments])
            with _marks.current_body.replaced(body), outside:
                result = train_step(*slices, *arguments)
            gradients = [one.grad for one in model.parameters()]  # of a backward pass in the step
            results += _trace.tensors_of([result, gradients])
        _refuse_runs(_C.runs_begun() - before)
        outside.refuse_updates()
        loss, *rest = result if isinstance(result, tuple | list) else (result,)
        _refuse_unfit(loss, rest, carried_tensors)
        unused.begin(outside.not_reached(loss))
        found.update(body.requests)
        loss = loss.clone()  # torch_xla divides it in place, and the step may carry it
        return (loss, *rest) if carried_tensors else loss

    own = tuple(_host.computed(one) if _C.is_constant(one) else one for one in carried_tensors)
    with _gradients_aside(model, unused):
        result = _host.accumulate(step, iterable_tensors, model, own)
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
        loss, *rest = result if isinstance(result, tuple | list) else (result,)
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
            "torch_xla.compile), whose results would be constants in the loop. Remove that from the step, and carry "
            f"the tensors to be printed. {see('gradient_accumulation')}"
        )


@contextlib.contextmanager
def _stand_ins(carried: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The step's arguments in place of carried tensors, and a list for its results.

    Raises ValueError if the step also reads such a tensor itself, which torch_xla's loop would take for the argument.
    """
    results: list[torch.Tensor] = []
    arguments = [_host.tensor_of_array(one, one.dtype, _host.op_sharding(one)) for one in carried]
    _host.read(arguments)
    nodes = list(map(_C.Node, arguments))
    yield arguments, results
    index = _C.read_otherwise(results, nodes)
    for tensor in carried:
        _C.drop_node(tensor)
    _host.read(carried)  # so that torch_xla knows the buffers by these again, and aliases updates in place
    if index is not None:
        raise ValueError(
            f"the train step reads carried_tensors[{index}] itself, or another tensor of its buffer, which has one "
            f"value in all iterations. Use the step's argument, in a scan as init or xs, or carry a .clone(). "
            f"{see('gradient_accumulation')}"
        )


class _Unused:
    """The parameters that the backward pass gives no gradient. In the loop, which takes one of each, it is zero."""

    def __init__(self) -> None:
        self._found: dict[int, torch.nn.Parameter] = {}
        self._hooks: list[Any] = []

    def begin(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:  # of a backward pass in the step
                continue
            parameter.grad = torch.zeros_like(parameter)
            self._found[id(parameter)] = parameter
            hook = parameter.register_post_accumulate_grad_hook(self._forget)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def _forget(self, parameter: torch.Tensor) -> None:
        self._found.pop(id(parameter), None)

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for parameter in self._found.values():
            parameter.grad = None


class _Outside(TorchFunctionMode):
    """The tensors from outside that the step uses: the slices, the model's, and those that it closes over.

    Its arguments in place of carried tensors are newer, and it may update them.
    """

    def __init__(self, model: torch.nn.Module, slices: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._parameters = {id(one): one for one in model.parameters() if one.requires_grad}
        self._slices = slices
        known = (*model.parameters(), *model.buffers(), *slices)
        self._known = {_C.identity(tensor)[0] for tensor in known}
        self._first_id = _host.tensor_id(torch.empty(0, device="xla"))
        # By id, with its number, its buffer (0 if it is pending) and its value before the step.
        self._used: dict[int, tuple[torch.Tensor, int, int, torch.Tensor]] = {}

    # torch.compile would trace it, and compile parts of the functions that the step calls.
    @_not_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in map(_host.without_wrapper, _trace.tensors_of((args, kwargs))):
            if id(tensor) not in self._used and self._has(tensor) and _C.state(tensor) != "donated":
                number, (_, buffer) = _host.tensor_id(tensor), _C.identity(tensor)
                self._used[id(tensor)] = tensor, number, buffer, tensor.detach().clone()
        return func(*args, **(kwargs or {}))

    def _has(self, tensor: torch.Tensor) -> bool:
        """Whether it is from outside. A tensor in the trace of a scan's body is none of torch_xla, and has no id."""
        return _C.identity(tensor)[0] != 0 and _host.tensor_id(tensor) < self._first_id

    def refuse_updates(self) -> None:
        """Raises ValueError if the step has updated one of them in place. They get their values back."""
        updated = [
            (tensor, value)
            for tensor, number, buffer, value in self._used.values()
            # Another thread's step may have given a pending one its buffer.
            if _host.tensor_id(tensor) != number or 0 != buffer != _C.identity(tensor)[1]
        ]
        for tensor, value in reversed(updated):
            _trace.give_back(tensor, value)
        for tensor, _ in updated:
            names = [f"a slice of iterable_tensors[{i}]" for i, one in enumerate(self._slices) if one is tensor]
            of_model = (*self._model.named_parameters(), *self._model.named_buffers())
            names += [f"model.{name}" for name, one in of_model if one is tensor]
            raise ValueError(
                f"the train step updates {(*names, _trees.dtype_and_shape(tensor))[0]} in place, which the loop would "
                "do only once. Compute a new tensor, carry it, or use a layer without running statistics. "
                f"{see('gradient_accumulation')}"
            )

    def not_reached(self, loss: torch.Tensor) -> list[torch.nn.Parameter]:
        """The parameters that are not in the graph of the loss. A checkpoint of activations hides those that it uses.

        Raises ValueError if another tensor from outside would get a gradient.
        """
        left, seen = dict(self._parameters), set()
        nodes = [loss.grad_fn]  # grows while it is read
        for node in nodes:
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            leaf = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
            # The step may have made one of a known tensor, as ``detach()`` does.
            if leaf is not None and _C.identity(leaf)[0] not in self._known and self._has(leaf):
                raise ValueError(
                    f"the train step's loss depends on {_trees.dtype_and_shape(leaf)}, which is no parameter of model, "
                    "so the loop would lose its gradient. Pass a module that has it, or call requires_grad_(False) of "
                    f"it. {see('gradient_accumulation')}"
                )
            left.pop(id(leaf), None)
        return list(left.values())


def _refuse_unfit(loss: Any, rest: Sequence[Any], carried: Sequence[torch.Tensor]) -> None:
    """Raises an error for results that do not fit. XLA would refuse the whole step with all pending work."""
    given = [_trees.dtype_and_shape(one) if isinstance(one, torch.Tensor) else type(one).__name__ for one in rest]
    if given != [_trees.dtype_and_shape(tensor) for tensor in carried]:
        raise ValueError(
            f"the train step returns a loss and ({', '.join(given)}), but carried_tensors are "
            f"({', '.join(map(_trees.dtype_and_shape, carried))}). Return a new value of the same shape and dtype for "
            f"each. {see('gradient_accumulation')}"
        )
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"the train step's loss is of type {type(loss).__name__}, not a tensor. Return the loss first. "
            f"{see('gradient_accumulation')}"
        )
    if loss.dtype != torch.float32 or loss.dim():
        raise TypeError(
            f"the train step's loss is {_trees.dtype_and_shape(loss)}, but torch_xla's loop adds up float32 scalars. "
            f"Return loss.float() or loss.mean(). {see('gradient_accumulation')}"
        )


@contextlib.contextmanager
def _gradients_aside(model: torch.nn.Module, unused: _Unused) -> Iterator[None]:
    """Hides existing gradients from the loop. Afterwards adds the new ones in place. If the loop fails, they stay."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        unused.end()
        found = [parameter.grad for parameter, _ in before]
        for parameter, gradient in before:
            parameter.grad = gradient
    for (parameter, gradient), new in zip(before, found):
        if gradient is None:
            parameter.grad = new
        elif new is not None:
            gradient.add_(new)


def _refuse_twice(carried: Sequence[torch.Tensor], model: torch.nn.Module) -> None:
    """Raises ValueError for two tensors of one buffer, one of them carried. torch_xla's loop has one place for both."""
    places: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        places.update(dict.fromkeys(_C.identity(tensor), f"model.{name}"))
    for index, tensor in enumerate(carried):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"carried_tensors[{index}] is of type {type(tensor).__name__}, not a tensor. Pass a tensor, or close "
                f"over the value in the step. {see('gradient_accumulation')}"
            )
        for key in filter(None, _C.identity(tensor)):
            first = places.setdefault(key, f"carried_tensors[{index}]")
            if first != f"carried_tensors[{index}]":
                raise ValueError(
                    f"carried_tensors[{index}] has the same buffer as {first}, but the loop gives it new values. Pass "
                    f"a .clone() as one of them. {see('gradient_accumulation')}"
                )
