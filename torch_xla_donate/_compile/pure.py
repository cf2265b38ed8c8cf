"""compile(f, pure=True): the function is traced once for each signature of its arguments, and replayed afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
import torch_xla
from torch.utils import _pytree as pytree

from torch_xla_donate import _C, _frames, _host, _numbers, _trees
from torch_xla_donate._compile.arguments import Arguments, Plan
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._compile.donated import Donated
from torch_xla_donate._compile.program import Program
from torch_xla_donate._compile.run_donation import Offer

_CLOSED_OVER = "the function closes over it, too"


class _Call:
    """The arguments of a call, taken apart."""

    def __init__(self, plan: Plan, args: Any, kwargs: Any, leaves: list[Any], structures: Sequence[Hashable]) -> None:
        self.plan, self.args, self.kwargs = plan, args, kwargs
        self.leaves, self.structures = leaves, structures
        self.sign()

    def sign(self) -> None:
        self.signature, self.pending, self.others = _C.signature(self.leaves)


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
        self._programs: dict[Hashable, Program] = {}

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        with _host.graph_name(self._graph_name):
            return self._f(*args, **kwargs)

    def leaves(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Donated leaves first, then the others; static arguments have none."""
        return self._chain(self._parts(plan, args, kwargs))

    @staticmethod
    def _parts(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[list[Any], Hashable]]:
        return [_trees.flatten_fast(slot.value(args, kwargs)) for slot in plan.donated + plan.kept]

    @staticmethod
    def _chain(parts: Sequence[tuple[list[Any], Hashable]]) -> list[Any]:
        leaves = list(itertools.chain.from_iterable(found for found, _ in parts))
        return [_trees.without_wrapper(leaf) for leaf in leaves] if _host.runtime().is_spmd() else leaves

    def _run(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        parts = self._parts(plan, args, kwargs)
        call = _Call(plan, args, kwargs, self._chain(parts), [structure for _, structure in parts])
        if call.pending:
            torch_xla.sync()
            call.sign()
        offer = Offer(Donated(self, plan, args, kwargs, parts), args, kwargs, where) if plan.donated else None
        try:
            try:
                result = self._replay(call, offer)
            except RuntimeError as error:
                if not _host.is_evicted(error):
                    raise
                self._programs.clear()  # what else was compiled before is likely to be gone, too
                result = self._replay(call, offer)
        except BaseException:
            if offer is not None:
                offer.cancel()
            raise
        if offer is not None:
            offer.end()
        return result

    def _replay(self, call: _Call, offer: Offer | None) -> Any:
        while True:
            key = (
                id(call.plan),
                *call.structures,
                call.signature,
                offer.choice() if offer is not None else None,
                self._values(call),
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                _host.autocast_state(),
                torch.get_default_dtype(),
                _host.shardings(call.leaves),
            )
            program = self._programs.get(key)
            if program is None or not program.is_current():
                program = self._trace_program(key, call, offer)
            if offer is None or not program.captured or not offer.refuse(program.captured, _CLOSED_OVER):
                break
        if offer is None:
            return program.run(call.leaves)
        if program.returned:
            offer.keep_returned([call.leaves[i] for i in program.returned])
        donors = program.donors or program.usable(offer.spared(call.leaves))
        with offer.consumed([call.leaves[i] for i in donors], program.name, program.places(donors)):
            return program.run(call.leaves)

    def _values(self, call: _Call) -> Hashable:
        """What is no tensor is a part of the program, as are static arguments; 1, 1.0 and True are told apart."""
        values = [*call.others, *(slot.value(call.args, call.kwargs) for slot in call.plan.static)]
        for value in call.others:
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{self.function} is declared pure, and a leaf of its arguments is of type "
                    f"{type(value).__name__}, which is no tensor and cannot be hashed. Register its class with "
                    "torch.utils._pytree, or pass something that has a hash."
                ) from None
        # Floats among the arguments are inputs of the graph. Of static ones 0.0 equals -0.0, and not a number does not
        # equal itself.
        count = len(call.others)
        return (
            *("float" if _numbers.is_float(value) else (type(value), value) for value in values[:count]),
            *((type(value), value.hex() if isinstance(value, float) else value) for value in values[count:]),
        )

    def note_compilation(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        pass  # its traces are counted

    def note_signature(self, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        # Floats are inputs. Static ones are not.
        into = list(args), dict(kwargs)
        for slot in (*plan.donated, *plan.kept):
            target: Any = into[isinstance(slot.key, str)]
            target[slot.key] = pytree.tree_map(
                lambda leaf: "a float" if _numbers.is_float(leaf) else leaf, target[slot.key]
            )
        super().note_signature(plan, *into, where)

    def _refuse_others(self, leaves: Sequence[Any]) -> None:
        elsewhere = _trees.first_off_device(leaves)
        if elsewhere is not None:
            raise ValueError(
                f"{self.function} is declared pure, and one of its arguments holds {_trees.dtype_and_shape(elsewhere)} "
                f"on {elsewhere.device}: its value would become a constant of the graph. Move it with .to('xla')."
            )

    def _trace_program(self, key: Hashable, call: _Call, offer: Offer | None) -> Program:
        self._refuse_others(call.leaves)
        if self._limit is not None and key not in self._programs and len(self._programs) >= self._limit:
            raise RuntimeError(
                f"{self.function} would get more than max_different_graphs={self._limit} graphs; its arguments differ "
                "in structure, shape, dtype or value from those before."
            )
        if key not in self._programs:
            self.note_signature(call.plan, call.args, call.kwargs, _frames.call_site())
        offered = offer.positions(call.leaves) if offer is not None else ()
        program = self._programs[key] = Program(self, call.plan, call.args, call.kwargs, offered)
        return program
