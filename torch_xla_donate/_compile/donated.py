"""The donated leaves of one call."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

from torch_xla_donate import _C, _marks, _trees
from torch_xla_donate._compile.arguments import CallNames, Plan
from torch_xla_donate._compile.base import Compiled

NOT_READ = "not read by the step"


class Donated:
    """The donated leaves of one call, and their names.

    parts: what `_trees.flatten_fast` gives for each argument, first those donated, then those kept.
    """

    def __init__(
        self,
        compiled: Compiled,
        plan: Plan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: Sequence[tuple[list[Any], Hashable]] | None = None,
    ) -> None:
        self._plan, self._compiled = plan, compiled
        if parts is None:
            parts = [_trees.flatten_fast(slot.value(args, kwargs)) for slot in (*plan.donated, *plan.kept)]
        count = len(plan.donated)
        self.leaves = list(itertools.chain.from_iterable(leaves for leaves, _ in parts[:count]))
        self._kept = list(itertools.chain.from_iterable(leaves for leaves, _ in parts[count:]))
        values = [slot.value(args, kwargs) for slot in plan.donated]
        self.names = compiled.names(plan, values, [structure for _, structure in parts[:count]])

    def mark(self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, *, held: bool) -> _C.Call:
        """Marks them, all or none. Held marks are for a run of a compiled graph; steps leave them alone.

        Raises:
            ValueError: a leaf is no XLA tensor, or is passed as an argument that is not donated, too.
            DonationError: a leaf is pending.
            DonatedBufferError: a leaf has been donated already.
        """
        strict = self._compiled.is_strict()
        marked = _C.mark_arguments(self.leaves, self._kept, where, strict, held, self.names)
        if not isinstance(marked, _C.Call) and marked[1] == "not_xla":
            self.leaves = [_trees.without_wrapper(leaf) for leaf in self.leaves]
            marked = _C.mark_arguments(self.leaves, self._kept, where, strict, held, self.names)
        if isinstance(marked, _C.Call):
            return marked
        if len(marked) == 3:
            self._passed_twice(marked[0], marked[1], args, kwargs)
        raise _marks.refusal(self.leaves[marked[0]], marked[1], self.names.name(marked[0]))

    def _passed_twice(self, donated: int, kept: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        parts = []
        for slot in self._plan.kept:
            leaves, names = _trees.flatten(slot.value(args, kwargs))
            parts.append((slot, len(leaves), names))
        raise _marks.passed_twice(self.names.name(donated), CallNames(parts).name(kept))
