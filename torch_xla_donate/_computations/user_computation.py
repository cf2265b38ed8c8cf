"""user_computation: torch_xla's function, which also donates the donors and aliases of the HLO module."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_xla_donate import _C, _config, _host, _marks, _report, _trees, hlo
from torch_xla_donate._errors import DonationError, see

# An instruction, or the head of a computation, as torch_xla prints them.
_NAMED = re.compile(r"^\s*(?:ENTRY |ROOT )?%(\S+) (?:= |\()", re.MULTILINE)


def user_computation(
    name: str,
    inputs: Sequence[torch.Tensor],
    computation: Any,
    *,
    strict: _config.Strict = None,
    stacklevel: int = 1,
) -> list[torch.Tensor]:
    """Calls an HLO module on XLA tensors, and donates the inputs that the module declares as donors.

    An input is donated if the module's ``buffer_donor`` or ``input_output_alias`` names its parameter. The next step
    may write an output into its buffer, as with `donate_buffer`. With an alias of the same shape and dtype it is the
    output that the alias names, as with ``into=``. Without such entries this is torch_xla's function. Inside a function
    made by `compile` only that function's arguments are donated.

    Args:
        name: name of the operation in messages and in torch_xla's dumps.
        inputs: one tensor for each parameter of the module, in order, of its shape and dtype. A parameter that is a
            tuple takes one tensor for each of its arrays.
        computation: a computation of `torch_xla.core.xla_builder`, made by ``create_computation``, or by
            ``computation_from_module_proto`` of a serialized HLO module.
        strict: what an unusable donation does, as for `donate_buffer`. If given and not ``"error"`` or True, an input
            that cannot be donated is kept, with a `DonationWarning` instead of an error, or with nothing for ``"off"``.
        stacklevel: the line of the donation, as for `donate_buffer`.

    Returns:
        A list of pending tensors, one for each element of the computation's result.

    Raises:
        TypeError: ``name``, an input, the computation, ``strict`` or ``stacklevel`` has another type.
        ValueError: number, shapes or dtypes of the inputs differ from those of the parameters, torch_xla cannot call
            the module, or an input that is not donated shares the buffer of a donated one.
        DonationError: a donated input is pending, or torch_xla shares its buffer between tensors.
        DonatedBufferError: a step has consumed an input.
    """
    request = _marks.DonationRequest.make(strict, stacklevel)
    if not isinstance(name, str):
        raise TypeError(
            f"name is of type {type(name).__name__}, not a str. Give the operation a name. {see('user_computations')}"
        )
    module = _module(computation)
    tensors = [_host.without_wrapper(tensor) for tensor in inputs]
    names = _trees.Places([(f"inputs[{index}] of {name}",) for index in range(len(tensors))])
    module.check(tensors, names)
    donated = to_donate(tensors, module.donors, names, request)
    results = _host.call_computation(name, tensors, module.callable)
    into: dict[int, torch.Tensor] = {}
    for index in donated:
        output = module.aliases.get(index)
        if output is not None and _trees.dtype_and_shape(results[output]) == _trees.dtype_and_shape(tensors[index]):
            into[index] = results[output]
    give(tensors, donated, names, request, into)
    return results


class _Module:
    """The header of a computation, read once.

    donors: the numbers of the inputs that it donates.
    aliases: the number of the output for each donor that has an alias.
    callable: a computation that takes one array for each input. It is the given one unless a parameter is a tuple.
    """

    def __init__(self, computation: Any) -> None:
        text = _host.computation_text(computation)
        header = hlo.parse(text)
        self._name = header.name
        self._check_names(text)
        self._places = {place: index for index, place in enumerate(header.leaves)}
        self._shapes = list(header.leaves.values())
        if not self._shapes or any(element.is_tuple for element in header.result.elements):
            raise ValueError(
                f"torch_xla cannot call computation {self._name}, because it takes no array, or returns a tuple in a "
                f"tuple. Give it a parameter, and let it return arrays. {see('user_computations')}"
            )
        self.aliases = {
            self._input(alias.donor): alias.output_index[0] if alias.output_index else 0 for alias in header.aliases
        }
        self.donors = sorted({self._input(donor) for donor in header.donors} | self.aliases.keys())
        self.callable = self._callable(computation, header.parameters)
        self._fits: set[tuple[Any, ...]] = set()

    def _input(self, donor: hlo.BufferDonor) -> int:
        place = (donor.parameter_number, donor.parameter_index)
        if place not in self._places:
            raise ValueError(
                f"computation {self._name} donates {donor}, which is a tuple and not an array. Donate the arrays in "
                f"the tuple, such as {hlo.BufferDonor(donor.parameter_number, (*donor.parameter_index, 0))}. "
                f"{see('user_computations')}"
            )
        return self._places[place]

    def _check_names(self, text: str) -> None:
        # At the step torch_xla's builder ends the process for such a name.
        for name in _NAMED.findall(text):
            if "." not in name:
                raise ValueError(
                    f"computation {self._name} has the name {name!r}, and torch_xla's builder ends the process for a "
                    "name without a '.'. Number each computation and instruction, "
                    f"such as {name}.1, or make the module by jax.jit(f).lower(...) or xla_builder.create_computation. "
                    f"{see('user_computations')}"
                )

    def _callable(self, computation: Any, parameters: Sequence[hlo.HloShape]) -> Any:
        try:
            caller = _host.calling(computation, parameters)
        except RuntimeError as error:
            # Else the step would raise it and lose all pending values.
            reason = str(error).partition("\n")[0].rstrip(": ")
            raise ValueError(
                f"torch_xla cannot call computation {self._name}: {reason}. A module that was parsed from HLO text "
                "lacks the unique ids that torch_xla's builder needs. Make the module by jax.jit(f).lower(...) or "
                f"xla_builder.create_computation. {see('user_computations')}"
            ) from None
        return caller if any(parameter.is_tuple for parameter in parameters) else computation

    def check(self, inputs: Sequence[Any], names: _trees.Names) -> None:
        """Checks the computation's inputs.

        Raises:
            TypeError: an input is not a tensor.
            ValueError: an input has another device, shape or dtype than the computation takes, or their number differs.
        """
        if len(inputs) != len(self._shapes):
            raise ValueError(
                f"computation {self._name} takes {len(self._shapes)} arrays, but inputs has {len(inputs)}. Pass one "
                f"tensor for each of these: {', '.join(map(str, self._shapes))}. {see('user_computations')}"
            )
        for index, tensor in enumerate(inputs):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(
                    f"{names.name(index)} is of type {type(tensor).__name__}, but a computation takes only XLA "
                    f"tensors. Pass a tensor. {see('user_computations')}"
                )
        kind = tuple((tensor.device.type, tensor.dtype, tensor.shape) for tensor in inputs)
        if kind in self._fits:
            return
        for index, (tensor, shape) in enumerate(zip(inputs, self._shapes)):
            if tensor.device.type != "xla":
                raise ValueError(
                    f"{names.name(index)} is {_trees.dtype_and_shape(tensor)} on {tensor.device}, but a computation "
                    f"takes only XLA tensors. Move it with .to('xla'). {see('user_computations')}"
                )
            found = _host.array_of(tensor)
            if found != shape:
                raise ValueError(
                    f"{names.name(index)} is {found}, but the computation takes {shape}. Pass a tensor of that shape "
                    f"and dtype, or build the computation for this one. {see('user_computations')}"
                )
        self._fits.add(kind)


_modules: weakref.WeakKeyDictionary[Any, _Module] = weakref.WeakKeyDictionary()


def _module(computation: Any) -> _Module:
    if not _host.is_computation(computation):
        raise TypeError(
            f"computation is of type {type(computation).__name__}, not a computation of torch_xla.core.xla_builder. "
            "Pass create_computation(...), or computation_from_module_proto(name, proto) of a serialized HLO module. "
            f"{see('user_computations')}"
        )
    module = _modules.get(computation)
    if module is None:
        module = _modules[computation] = _Module(computation)
    return module


def to_donate(
    tensors: Sequence[Any], donors: Sequence[int], names: _trees.Names, request: _marks.DonationRequest
) -> list[int]:
    """The donors of a computation that can be donated. Runs before the computation, so an error changes nothing.

    Unless it is strict, it warns instead if ``strict`` was given, and in eager mode. In eager mode a strict donation
    raises DonationError.

    Raises:
        ValueError: an input that is not donated shares the buffer of a donor.
        DonationError: a donor is pending, or torch_xla shares its buffer between tensors.
    """
    if not donors or _marks.inside_call.value or _config.IS_OFF:
        return []
    _marks.prepare(request.where)
    eager = _host.in_eager_mode()
    strict = _config.strictness(request.strict)
    may_warn = strict < _config.Strictness.ERROR and (eager or request.strict is not None)
    body = _marks.current_body.value
    kept = {
        _C.identity(tensors[index])[1]: index
        for index in set(range(len(tensors))).difference(donors)
        if isinstance(tensors[index], torch.Tensor)
    }
    free: list[int] = []
    unfit: dict[int, str] = {}
    for index in donors:
        tensor = tensors[index]
        argument = body.argument(tensor) if body is not None else None
        if body is not None and argument is not None:
            body.donate(argument, request)
            continue
        try:
            _check_donor(tensor, index, kept, names)
            free.append(index)
        except (DonationError, TypeError, ValueError) as error:
            if not may_warn:
                raise
            unfit[index] = str(error).partition(" Nothing was ")[0]  # the other donors are marked
    if unfit and strict > _config.Strictness.OFF:
        lines = "\n  ".join(unfit.values())
        arrays = ", ".join(f"{_trees.dtype_and_shape(tensors[index])} {names.name(index)}" for index in unfit)
        _report.warn_once(
            f"Some donated buffers were not usable: {arrays} (donated at {request.where}).\n  {lines}\n"
            f"  They stay readable, and the computation runs. {see('user_computations')}",
            request.where,
        )
    if eager and free:
        refused = [_marks.Donation(names.name(index), tensors[index], request) for index in free]
        _marks.refuse_all(refused, _C.Reason("eager_computation"))
        return []
    return free


def _check_donor(tensor: torch.Tensor, index: int, kept: Mapping[int, int], names: _trees.Names) -> None:
    state = _C.state(tensor)
    if state not in ("materialized", "marked", "donated"):  # a consumed tensor raises at its use
        raise _marks.refusal(tensor, state, names.name(index))
    buffer = _C.identity(tensor)[1]
    if buffer in kept:
        raise _marks.passed_twice(names.name(index), names.name(kept[buffer]))


def give(
    tensors: Sequence[Any],
    donated: Sequence[int],
    names: _trees.Names,
    request: _marks.DonationRequest,
    into: Mapping[int, torch.Tensor],
) -> None:
    """Marks the donors that `to_donate` returned. into: the outputs that should reuse their buffers."""
    _marks.mark_all([_marks.Donation(names.name(index), tensors[index], request, into.get(index)) for index in donated])
