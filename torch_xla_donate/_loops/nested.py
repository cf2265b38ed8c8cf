"""A scan in the body of another scan. In the body's trace the inner loop is one operation."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_xla_donate import _host
from torch_xla_donate._errors import see
from torch_xla_donate._locks import make_lock

# (carry, slices) -> (carry, outputs), all lists of tensors
Flat = Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]


class Loop:
    """An inner loop. The operation has only its number, so the owner of a trace has to keep its loops."""

    def __init__(self, body: Flat) -> None:
        self.body = body
        self.number = next(_numbers)
        _loops[self.number] = self


_numbers = itertools.count()
_loops: weakref.WeakValueDictionary[int, Loop] = weakref.WeakValueDictionary()


def _run(number: int, init: list[torch.Tensor], xs: list[torch.Tensor], reverse: bool) -> list[torch.Tensor]:
    carry, ys = _host.scan_loop(_loops[number].body, init, xs, reverse)
    return [*carry, *ys]


def _shapes(number: int, init: list[torch.Tensor], xs: list[torch.Tensor], reverse: bool) -> list[torch.Tensor]:
    with _NoRandomNumbers():  # type: ignore[no-untyped-call]
        carry, ys = _loops[number].body(list(init), [x[0] for x in xs])
    return [*map(torch.empty_like, carry), *(y.new_empty((len(xs[0]), *y.shape)) for y in ys)]


class _NoRandomNumbers(TorchDispatchMode):
    """Refuses random numbers: torch_xla finds the seed only in the first loop of a step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotImplementedError(
                f"a scan in the body of another scan draws random numbers ({func}), but torch_xla would draw the same "
                f"ones in each iteration. Draw them outside the outer scan, and pass them with xs. {see('loops')}"
            )
        return func(*args, **(kwargs or {}))


def _operation() -> Callable[..., list[torch.Tensor]]:
    with _defining:  # a library can be defined only once
        return _defined()


@functools.cache
def _defined() -> Callable[..., list[torch.Tensor]]:
    library = torch.library.Library("torch_xla_donate", "DEF")  # type: ignore[no-untyped-call]
    library.define("scan(int number, Tensor[] init, Tensor[] xs, bool reverse) -> Tensor[]")  # type: ignore[no-untyped-call]
    library.impl("scan", _run, "XLA")  # type: ignore[no-untyped-call]
    torch.library.register_fake("torch_xla_donate::scan", _shapes, lib=library)
    _keep.append(library)
    operation: Callable[..., list[torch.Tensor]] = torch.ops.torch_xla_donate.scan
    return operation


_keep: list[torch.library.Library] = []  # the destructor of a library removes its operations
_defining, _lock = make_lock(), make_lock()
_holders: list[list[object]] = []
_patch = contextlib.ExitStack()


@contextlib.contextmanager
def allowed(loops: list[object]) -> Iterator[None]:
    """Bodies that are traced inside may contain loops, which are added to `loops`."""
    with _lock:
        if not _holders:
            _patch.enter_context(_host.nested_scans(_loop_in_a_trace))
        _holders.append(loops)
    try:
        yield
    finally:
        with _lock:
            # By identity: lists of the same loops are equal.
            del _holders[next(index for index, held in enumerate(_holders) if held is loops)]
            for outer in _holders if loops else ():
                outer.append(loops)  # a pure body that was traced before makes no new loops
            if not _holders:
                _patch.close()


def is_in_a_trace(layer: object) -> bool:
    """Whether a module belongs to a layer in a running trace, which has replaced its tensors."""
    return isinstance(layer, torch.nn.Module) and any(map(_host.is_traced, _tensors(layer)))


def _tensors(layer: torch.nn.Module) -> list[torch.Tensor]:
    return [*layer.parameters(), *layer.buffers()]


class InATrace:
    """Such a module for torch_xla to copy. Each call replaces the copy's tensors, so these are not copied."""

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self.named_parameters, self.named_buffers = layer.named_parameters, layer.named_buffers

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        memo.update((id(tensor), tensor) for tensor in _tensors(self._layer))
        return copy.deepcopy(self._layer, memo)


def _loop_in_a_trace(
    body: Flat, init: list[torch.Tensor], xs: list[torch.Tensor], reverse: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if not xs:
        # torch_xla takes the number of iterations from the first array.
        raise NotImplementedError(
            "a scan in the body of another scan has a backward pass with nothing to go over. Return an output from its "
            f"body, such as the new carry. {see('loops')}"
        )
    loop = Loop(body)
    with _lock:
        # To all of them: autograd traces the backward pass of a loop on another thread than its scan.
        for holder in _holders:
            holder.append(loop)
    found = _operation()(loop.number, init, xs, reverse)
    return found[: len(init)], found[len(init) :]
