"""The base class of the functions made by `compile`."""

from __future__ import annotations

import contextlib
import copy
import enum
import functools
import numbers
import operator
import sys
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _config, _frames, _host, _marks, _modes, _report, _trees
from torch_xla_donate._compile.arguments import Argument, Arguments, CallArguments
from torch_xla_donate._compile.lower import Lowered
from torch_xla_donate._errors import DonationError, DonationWarning, see
from torch_xla_donate._host import interrupts


class Compiled:
    """A function that runs as one step. `compile` makes it, and the subclasses run the step.

    Attributes:
        traces_floats: whether Python floats among the arguments are inputs of the graph.
        stacklevel: as for `compile`.
        remake: compiles another function with the same options.
    """

    traces_floats = False
    stacklevel = 1
    remake: Callable[[Any], Any]

    def __init__(self, f: Callable[..., Any], arguments: Arguments, strict: _config.Strict) -> None:
        functools.update_wrapper(self, f, updated=())
        self._f = f
        self._arguments = arguments
        self._strict = strict
        self._names: dict[Any, _trees.Places] = {}

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __copy__(self) -> Compiled:
        return self  # as for a function

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        f = copy.deepcopy(self._f, memo)
        if id(self) in memo:  # an attribute of the method's object, which has just been copied
            return memo[id(self)]
        # The graphs of a method hold its object, so the method of a copied object has graphs of its own.
        return self if f is self._f else self.remake(f)

    def __reduce__(self) -> str:
        """Pickles the function by its name, as Python does with functions."""
        name = getattr(self, "__qualname__", "")
        try:
            found = operator.attrgetter(name)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            found = None
        if found is not self:
            raise TypeError(
                f"the compiled {self.function} cannot be pickled, because {name!r} is not its name in a module and its "
                f"graphs belong to this process. Pickle the function, and compile it where it is loaded. "
                f"{see('compile_errors')}"
            )
        return name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._arguments.function}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside another step, or a loop's body, the call belongs to that and has no separate step to donate at.
        if _marks.inside_call.value or _marks.current_body.value is not None or torch.compiler.is_compiling():
            return self._f(*args, **kwargs)
        with interrupts.Restored():
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = _frames.call_site(self.stacklevel)
        _marks.prepare(where)
        call = CallArguments(self._arguments.roles(args, kwargs), args, kwargs)
        for argument in call.roles.static:
            check_static(argument, argument.value(args, kwargs))
        _marks.inside_call.value = True
        try:
            # Errors and warnings wait until torch_xla has restored its state. Autograd's threads may hold gradients
            # when the step begins.
            with _report.postpone_notices(), torch.autograd.set_multithreading_enabled(False):
                result = self._run(call, where)
        finally:
            _marks.inside_call.value = False
        try:
            if call.roles.donated and self.strictness() == _config.Strictness.ERROR:
                # Else a later step would raise the error, without this call's result.
                _C.wait_for_steps()
            if _C.has_notices():
                _report.warn_or_raise()
            if _C.disabled():
                _modes.check_outputs(lambda: _names_of_outputs(call, result))
        except (DonationError, DonationWarning) as error:
            if isinstance(error, DonationError):
                error.result = result
            raise
        return result

    @property
    def function(self) -> str:
        """The function's name in messages."""
        return self._arguments.function

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as a part of the caller's step."""
        with _marks.inside_call.replaced(True), torch.autograd.set_multithreading_enabled(False):
            return self._f(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Traces the function for these arguments, without running it.

        Args:
            *args: as for a call. Arrays may be placeholders without memory (`placeholder`, `placeholder_like`). Real
                arrays are not consumed.
            **kwargs: as for a call.

        Returns:
            An object with ``as_text()`` (HLO), ``args_info`` and ``compile()``, which has ``memory_analysis()``.
            torch_xla's lazy tensors trace it, for each backend.

        Raises:
            DonationError: the function reads a value on the host.
        """
        _marks.prepare(_frames.call_site(self.stacklevel))
        return Lowered(self, CallArguments(self._arguments.roles(args, kwargs), args, kwargs))

    def _run(self, call: CallArguments, where: str) -> Any:
        """Runs the step and ends its marks. Returns f's result."""
        raise NotImplementedError

    def on_device(self, call: CallArguments, devices: Sequence[int]) -> contextlib.AbstractContextManager[Any]:
        """A context in which the device of the call's arguments is the current one, because graphs run on that.

        devices: those of the arguments, from `_C.devices`.

        Raises ValueError if there are several.
        """
        if len(devices) < 2:
            return _host.on_device(devices)
        leaves, names = call.leaves(call.roles.nonstatic)
        tensors = [(leaf.device, names.name(i)) for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        name_on = {device: name for device, name in reversed(tensors) if device.type == "xla"}
        places = [f"{name} is on {device}" for device, name in reversed(name_on.items())]
        raise ValueError(
            f"a compiled graph runs on one device, but {', and '.join(places[:2])}. Move the arguments of "
            f'{self.function} to one device, or use backend="lazy" without pure=True. Nothing was donated. '
            f"{see('compile_errors')}"
        )

    def strictness(self) -> _config.Strictness:
        """The effect of an unusable donation of this function."""
        return _config.strictness(self._strict)

    def names(self, call: CallArguments, structures: Sequence[Hashable]) -> _trees.Places:
        """The names of a call's donated leaves. Computed once for each structure, because it is slow.

        Raises:
            TypeError: a leaf is an object that might hold tensors.
        """
        key = (id(call.roles), *structures)
        found = self._names.get(key)
        if found is None:
            leaves, found = call.leaves(call.roles.donated)
            _refuse_opaque(leaves, found)
            self._names[key] = found
        return found


def _names_of_outputs(call: CallArguments, result: Any) -> dict[int, str]:
    """The names of a call's outputs by their buffers: paths in the result, or arguments that it updated in place."""
    try:
        leaves, names = call.leaves(call.roles.nonstatic)
        results, paths = _trees.flatten(result, "the result")
    except RecursionError:
        return {}
    named = [
        *((leaf, names.name(index)) for index, leaf in enumerate(leaves)),
        *((leaf, _trees.qualified_name("result", paths.name(index))) for index, leaf in enumerate(results)),
    ]
    tensors = [(leaf, name) for leaf, name in named if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla"]
    return {_C.identity(tensor)[1]: name for tensor, name in tensors}


# Leaves of these types hide no tensors.
HARMLESS = (torch.Tensor, numbers.Number, str, bytes, types.NoneType, enum.Enum, torch.dtype, torch.device, torch.Size)


def _refuse_opaque(leaves: Sequence[Any], names: _trees.Places) -> None:
    """Raises TypeError for a donated leaf that may hide tensors, such as an unregistered dataclass."""
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, HARMLESS) and not callable(leaf):
            raise _marks.refusal(leaf, "not_tensor", names.name(index))


def check_static(argument: Argument, value: Any) -> None:
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            f"{argument} is static, but {type(value).__name__} cannot be hashed. Pass a "
            f"hashable value, such as a tuple. {see('compile_errors')}"
        ) from None
