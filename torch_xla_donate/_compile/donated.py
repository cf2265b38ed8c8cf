"""The donated leaves of one call."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NoReturn

from torch_xla_donate import _C, _marks, _trees
from torch_xla_donate._compile.arguments import ArgumentRoles, CallNames
from torch_xla_donate._compile.base import Compiled

NOT_READ = "not read by the step"


class DonatedArguments:
    """The donated leaves of one call, and their names.

    parts: the result of `_trees.flatten_fast` for each argument, first the donated ones, then the kept ones.
    """

    def __init__(
        self,
        compiled: Compiled,
        roles: ArgumentRoles,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: Sequence[tuple[list[Any], Hashable]] | None = None,
    ) -> None:
        self._roles, self._compiled = roles, compiled
        if parts is None:
            parts = [_trees.flatten_fast(argument.value(args, kwargs)) for argument in (*roles.donated, *roles.kept)]
        count = len(roles.donated)
        self.leaves = list(itertools.chain.from_iterable(leaves for leaves, _ in parts[:count]))
        self._kept = list(itertools.chain.from_iterable(leaves for leaves, _ in parts[count:]))
        values = [argument.value(args, kwargs) for argument in roles.donated]
        self.names = compiled.names(roles, values, [structure for _, structure in parts[:count]])

    def mark(self, args: Sequence[Any], kwargs: Mapping[str, Any], where: str, *, for_compiled_run: bool) -> _C.Call:
        """Marks all of them, or none. Steps ignore marks that are for a run of a compiled graph.

        Raises:
            ValueError: a leaf is not an XLA tensor, or shares its buffer with an argument that is not donated.
            DonationError: a leaf is pending.
            DonatedBufferError: a leaf has been donated already.
        """
        strict = self._compiled.is_strict()
        marked = _C.mark_arguments(self.leaves, self._kept, where, strict, for_compiled_run, self.names)
        if marked.refusal is not None and marked.refusal.obstacle == "not_xla":
            self.leaves = [_trees.without_wrapper(leaf) for leaf in self.leaves]
            marked = _C.mark_arguments(self.leaves, self._kept, where, strict, for_compiled_run, self.names)
        why = marked.refusal
        if why is None:
            return marked
        if why.kept is not None:
            self._passed_twice(why.leaf, why.kept, args, kwargs)
        raise _marks.refusal(self.leaves[why.leaf], why.obstacle, self.names.name(why.leaf))

    def _passed_twice(self, donated: int, kept: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        parts = []
        for argument in self._roles.kept:
            leaves, names = _trees.flatten(argument.value(args, kwargs))
            parts.append((argument, len(leaves), names))
        raise _marks.passed_twice(self.names.name(donated), CallNames(parts).name(kept))
