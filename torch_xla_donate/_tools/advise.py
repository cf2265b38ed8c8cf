"""advise: runs a function as steps, and returns what they could still donate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch_xla
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _config
from torch_xla_donate._compile.arguments import Arguments
from torch_xla_donate._errors import see
from torch_xla_donate._modes.debug import listening, note_error
from torch_xla_donate._tools.findings import Call
from torch_xla_donate._tools.hints import Advice
from torch_xla_donate._tools.step_watch import StepWatch


def advise(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Advice:
    """Finds memory that a step could still save: which tensor, which line, and the call to write.

    Calls ``f(*args, **kwargs)`` twice, and ends each call with ``torch_xla.sync()``. The first call shows the state of
    a loop before the second one, and only the steps of the second count. So an optimizer advances by two steps.
    Looks only at steps of this thread, and at most at the first 16 of a call.
    Pending work runs first, in a separate step. It donates nothing itself, and drops the results.

    Args:
        f: the step, such as the body of a training loop, with or without ``torch_xla.sync()``.
        args, kwargs: its arguments. They stay as they are, except for what ``f`` does to them.

    Returns:
        The hints, those that save the most bytes on a device first. Empty if there is nothing to gain.

    Raises:
        TypeError: ``f`` cannot be called.
    """
    if not callable(f):
        raise TypeError(
            f"f is of type {type(f).__name__}, which cannot be called. Pass the function of a step, and its arguments "
            f"after it. {see('advise')}"
        )
    torch_xla.sync()
    if _config.IS_OFF:
        for _ in range(2):
            f(*args, **kwargs)
            torch_xla.sync()
        return Advice()
    watch = StepWatch()
    with listening(watch.note):
        for _ in range(2):
            watch.begin()
            result = f(*args, **kwargs)
            try:
                watch.call = _call(f, args, kwargs, result)
            except Exception as error:  # of an odd callable or container; the hints then do without the arguments
                note_error(error)
            torch_xla.sync()
            watch.call = None
            del result
    return watch.advice()


def _call(f: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Call:
    """The tensors of a call. Modules are not arguments to donate, as the caller needs them again."""
    code = getattr(inspect.unwrap(f), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    arguments: dict[int, tuple[int | str, str]] = {}
    leaves: dict[int | str, int] = {}
    for argument in Arguments(f).roles(args, kwargs).kept:
        for leaf in _tensors(argument.value(args, kwargs)):
            arguments[leaf] = (argument.key, argument.name)
            leaves[argument.key] = leaves.get(argument.key, 0) + 1
    return Call(where, arguments, leaves, _tensors(result))


def _tensors(tree: Any) -> dict[int, torch.Tensor]:
    """The XLA tensors of a pytree, by alias id."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"]
    return {_C.alias_ids(leaf)[-1]: leaf for leaf in leaves}
