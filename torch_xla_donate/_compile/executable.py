"""The results of `lower`: the types of the arguments, and compiled functions for this machine or for a topology."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from torch_xla_donate import _host, _numbers, _trees, hlo
from torch_xla_donate._compile.arguments import CallArguments
from torch_xla_donate._errors import see
from torch_xla_donate._text import cut


class Lowerable(Protocol):
    """A function made by `compile`, as far as `lower` needs it."""

    traces_floats: bool

    @property
    def function(self) -> str: ...
    def body(self, *args: Any, **kwargs: Any) -> Any: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class ArgInfo:
    """A tensor leaf of the arguments.

    Attributes:
        shape: sizes of the whole array.
        dtype: the torch dtype.
        donated: whether a call donates its buffer. False if torch_xla ignores donors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    donated: bool

    def __str__(self) -> str:
        return _trees.dtype_and_shape(self)


class Types:
    """The types of a call's arguments, leaf by leaf."""

    def __init__(self, call: CallArguments, floats_are_inputs: bool) -> None:
        static = {argument.key for argument in call.roles.static}
        donated = set() if _host.ignores_donors() else {argument.key for argument in call.roles.donated}
        arguments = (*enumerate(call.args), *call.kwargs.items())
        leaves = [(key, leaf) for key, value in arguments for leaf in pytree.tree_leaves(value)]
        self._inputs = [floats_are_inputs and key not in static and _numbers.is_float(leaf) for key, leaf in leaves]
        self._infos = [_info(leaf, key in donated) for key, leaf in leaves]
        self._spec = pytree.tree_structure((call.args, call.kwargs))

    def tree(self) -> Any:
        """``(args, kwargs)`` with an `ArgInfo` for each tensor."""
        return pytree.tree_unflatten(self._infos, self._spec)

    def check(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises TypeError unless the arguments have these types."""
        _, spec = pytree.tree_flatten((args, kwargs))
        if _trees.structure_key(self._spec) != _trees.structure_key(spec):
            raise TypeError(
                f"{function} was compiled for arguments of the structure {self._spec}, but this call has {spec}. Call "
                f"the function itself, or lower() it for these arguments. {see('ahead')}"
            )
        found, places = _trees.with_places((args, kwargs))
        differing = []
        for index, (info, leaf) in enumerate(zip(self._infos, found)):
            now: Any = _info(leaf, getattr(info, "donated", False))
            if _trees.exact(now) != _trees.exact(info) and not (self._inputs[index] and _numbers.is_float(leaf)):
                _, key, *path = map(str, places[index])
                place = f"argument {key[1:-1]}{''.join(path)}"
                differing.append(f"{place}: compiled for {info}, called with {now}")
        if differing:
            shown = "; ".join(cut(differing, 5, "and {:,} more"))
            raise TypeError(
                f"{function} was compiled for other types of arguments: {shown}. Call the function itself, or lower() "
                f"it for these arguments. {see('ahead')}"
            )


@dataclasses.dataclass(eq=False, repr=False)
class Executable:
    """A function compiled for certain arguments. `Lowered.compile` makes it. Call it like the function.

    Attributes:
        topology: the TPUs that it was compiled for, which cannot run it here; empty for this machine.
    """

    _compiled: Lowerable
    _types: Types
    _before: hlo.HloModule | None
    _text: str
    _memory: hlo.MemoryAnalysis | str
    _names: Sequence[str]
    topology: str = ""

    @property
    def args_info(self) -> Any:
        """As `Lowered.args_info`."""
        return self._types.tree()

    def as_text(self) -> str:
        """HLO after optimisation; ``input_output_alias`` lists the parameters whose memory outputs reuse."""
        return self._text

    @functools.cached_property
    def donors(self) -> tuple[hlo.DonorOutcome, ...]:
        """The outcome of each donor: the output that takes its memory, or the reason why none does."""
        if self._before is None:
            return ()
        outcomes = hlo.donor_outcomes(self._before, hlo.parse(self._text))
        # torch_xla may have put all parameters into one tuple.
        places = [(outcome.donor.parameter_index or (outcome.donor.parameter_number,))[0] for outcome in outcomes]
        return tuple(dataclasses.replace(one, name=self._names[place]) for one, place in zip(outcomes, places))

    def memory_analysis(self) -> hlo.MemoryAnalysis:
        """The bytes of a run on one device. Raises RuntimeError if the platform reports none, or nothing runs."""
        from torch_xla_donate.hlo.outcomes import read_statistics

        if self._before is None:
            raise RuntimeError(
                f"{self._compiled.function} computes nothing on the device, so there is no memory to report. Return "
                f"the results of the step. {see('ahead')}"
            )
        found = read_statistics(self._memory) if isinstance(self._memory, str) else self._memory
        if found is None:
            raise RuntimeError(
                f"this platform reports no memory statistics (XLA returned {self._memory!r}). Read the shapes in "
                f"as_text() instead. {see('ahead')}"
            )
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.topology:
            raise TypeError(
                f"{self._compiled.function} was compiled for {self.topology}, so it cannot be called here. Call the "
                f"function itself. {see('ahead')}"
            )
        self._types.check(self._compiled.function, args, kwargs)
        return self._compiled(*args, **kwargs)


def _info(leaf: Any, donated: bool) -> Any:
    return ArgInfo(tuple(leaf.shape), leaf.dtype, donated) if isinstance(leaf, torch.Tensor) else leaf
