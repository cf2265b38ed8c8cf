"""compile(f, pure=True): traces the function once for each signature of its arguments, then replays the graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch_xla
from torch.utils import _pytree as pytree

from torch_xla_donate import _frames, _host, _numbers, _trees
from torch_xla_donate._compile.arguments import ArgumentRoles, Arguments
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.donated import DonatedArguments
from torch_xla_donate._compile.program import TracedProgram
from torch_xla_donate._compile.run_donation import RunDonation
from torch_xla_donate._compile.signatures import signature_of
from torch_xla_donate._errors import see

_CLOSED_OVER = "the function also closes over it"


class _Call:
    """The flattened arguments of a call, and their signature."""

    def __init__(
        self, roles: ArgumentRoles, args: Any, kwargs: Any, leaves: list[Any], structures: Sequence[Hashable]
    ) -> None:
        self.roles, self.args, self.kwargs = roles, args, kwargs
        self.leaves, self.structures = leaves, structures
        self.sign()

    def sign(self) -> None:
        found = signature_of(self.leaves)
        self.signature, self.pending, self.others = found.key, found.pending, found.others


def _exact(value: Any) -> Hashable:
    """A key that distinguishes equal values of other types or signs: 1, 1.0 and True; 0.0 and -0.0; NaN equals NaN."""
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, complex):
        return type(value), value.real.hex(), value.imag.hex()
    if isinstance(value, tuple | frozenset):
        parts = map(_exact, value)
        return type(value), frozenset(parts) if isinstance(value, frozenset) else tuple(parts)
    return type(value), value


class PureCompiled(Compiled):
    """Traces the function once for each signature, then runs the compiled graph on the arguments of each call."""

    per_signature = "traced"
    traces_floats = True

    def __init__(
        self,
        f: Callable[..., Any],
        arguments: Arguments,
        strict: bool | None,
        *,
        name: str | None = None,
        full_graph: bool = True,
        max_different_graphs: int | None = None,
    ) -> None:
        super().__init__(f, arguments, strict)
        self._graph_name = name or arguments.function
        self._limit = max_different_graphs
        self._programs: dict[Hashable, TracedProgram] = {}

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        with _host.graph_name(self._graph_name):
            return self._f(*args, **kwargs)

    def leaves(self, roles: ArgumentRoles, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of donated arguments, then those of the others. Static arguments have none."""
        return self._chain(self._parts(roles, args, kwargs))

    @staticmethod
    def _parts(
        roles: ArgumentRoles, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[tuple[list[Any], Hashable]]:
        return [_trees.flatten_fast(argument.value(args, kwargs)) for argument in roles.donated + roles.kept]

    @staticmethod
    def _chain(parts: Sequence[tuple[list[Any], Hashable]]) -> list[Any]:
        leaves = list(itertools.chain.from_iterable(found for found, _ in parts))
        return [_trees.without_wrapper(leaf) for leaf in leaves] if _host.runtime().is_spmd() else leaves

    def _run(self, roles: ArgumentRoles, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        parts = self._parts(roles, args, kwargs)
        call = _Call(roles, args, kwargs, self._chain(parts), [structure for _, structure in parts])
        if call.pending:
            torch_xla.sync()
            call.sign()
        donation = (
            RunDonation(DonatedArguments(self, roles, args, kwargs, parts), args, kwargs, where)
            if roles.donated
            else None
        )
        try:
            try:
                result = self._replay(call, donation)
            except RuntimeError as error:
                if not _host.is_evicted(error):
                    raise
                self._programs.clear()  # torch_xla has probably dropped the others as well
                result = self._replay(call, donation)
        except BaseException:
            if donation is not None:
                donation.cancel()
            raise
        if donation is not None:
            donation.end()
        return result

    def _replay(self, call: _Call, donation: RunDonation | None) -> Any:
        while True:
            key = (
                id(call.roles),
                *call.structures,
                call.signature,
                donation.choice() if donation is not None else None,
                self._values(call),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                _host.autocast_state(),
                torch.get_default_dtype(),
                _host.shardings(call.leaves),
            )
            program = self._programs.get(key)
            if program is None or not program.is_current():
                program = self._trace_program(key, call, donation)
            if donation is None or not program.captured or not donation.refuse(program.captured, _CLOSED_OVER):
                break
        if donation is None:
            return program.run(call.leaves)
        if program.returned:
            donation.keep_returned([call.leaves[i] for i in program.returned])
        donors = program.donors or program.usable(donation.spared(call.leaves))
        with donation.consumed([call.leaves[i] for i in donors], program.name, program.places(donors)):
            return program.run(call.leaves)

    def _values(self, call: _Call) -> Hashable:
        """The leaves that are not tensors and the static arguments, for the program's key. 1, 1.0 and True differ."""
        values = [*call.others, *(argument.value(call.args, call.kwargs) for argument in call.roles.static)]
        for value in call.others:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{self.function} is declared pure, but a leaf of its arguments is of type "
                    f"{type(value).__name__}, which is neither a tensor nor hashable. Register its class with "
                    f"torch.utils._pytree, or pass a hashable value. {see('pure')}"
                ) from None
        # Floats among the leaves are inputs of the graph.
        count = len(call.others)
        return (
            *("float" if _numbers.is_float(value) else _exact(value) for value in values[:count]),
            *map(_exact, values[count:]),
        )

    def note_compilation(
        self, roles: ArgumentRoles, args: Sequence[Any], kwargs: Mapping[str, Any], where: str
    ) -> None:
        pass  # _trace_program counts the traces

    def note_signature(self, roles: ArgumentRoles, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        # Floats are inputs. Static ones are not.
        into = list(args), dict(kwargs)
        for argument in (*roles.donated, *roles.kept):
            target: Any = into[isinstance(argument.key, str)]
            target[argument.key] = pytree.tree_map(
                lambda leaf: "a float" if _numbers.is_float(leaf) else leaf, target[argument.key]
            )
        super().note_signature(roles, *into, where)

    def _refuse_others(self, leaves: Sequence[Any]) -> None:
        elsewhere = _trees.first_off_device(leaves)
        if elsewhere is not None:
            raise ValueError(
                f"{self.function} is declared pure, but one of its arguments holds {_trees.dtype_and_shape(elsewhere)} "
                f"on {elsewhere.device}, which would become a constant of the graph. Move it with .to('xla'). "
                f"{see('pure')}"
            )

    def _trace_program(self, key: Hashable, call: _Call, donation: RunDonation | None) -> TracedProgram:
        self._refuse_others(call.leaves)
        if self._limit is not None and key not in self._programs and len(self._programs) >= self._limit:
            raise RuntimeError(
                f"{self.function} would get more than max_different_graphs={self._limit} graphs, because its arguments "
                "differ in structure, shape, dtype or value from those before. Pass arguments like those, or raise the "
                f"limit. {see('pure')}"
            )
        if key not in self._programs:
            self.note_signature(call.roles, call.args, call.kwargs, _frames.call_site())
        offered = donation.positions(call.leaves) if donation is not None else ()
        program = self._programs[key] = TracedProgram(self, call.roles, call.args, call.kwargs, offered)
        return program
