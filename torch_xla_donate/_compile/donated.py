"""The donated leaves of one call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch_xla_donate import _C, _host, _marks, _trees
from torch_xla_donate._compile.arguments import CallArguments
from torch_xla_donate._compile.base import Compiled

NOT_READ = _C.Reason("not_read")


def leaves_of_call(call: CallArguments) -> tuple[list[Any], list[tuple[list[Any], Hashable]]]:
    """The leaves of donated arguments, then those of kept ones; and for each argument `_trees.flatten_fast`."""
    parts = call.flattened(call.roles.nonstatic)
    leaves = [leaf for found, _ in parts for leaf in found]
    return [_trees.without_wrapper(leaf) for leaf in leaves] if _host.runtime().is_spmd() else leaves, parts


class DonatedArguments:
    """The donated leaves of one call, and their names.

    parts: the result of `_trees.flatten_fast` for each argument, first the donated ones, then the kept ones.
    """

    def __init__(self, compiled: Compiled, call: CallArguments, parts: Sequence[tuple[list[Any], Hashable]]) -> None:
        self._compiled, self._call = compiled, call
        count = len(call.roles.donated)
        self.leaves = [leaf for leaves, _ in parts[:count] for leaf in leaves]
        self._kept = [leaf for leaves, _ in parts[count:] for leaf in leaves]
        self.names = compiled.names(call, [structure for _, structure in parts[:count]])

    def mark(self, where: str, *, for_compiled_run: bool) -> _C.Call:
        """Marks all of them, or none. Steps ignore marks that are for a run of a compiled graph.

        Raises:
            ValueError: a leaf is not an XLA tensor, or shares its buffer with an argument that is not donated.
            DonationError: a leaf is pending.
            DonatedBufferError: a leaf has been donated already.
        """
        strict = self._compiled.strictness()
        marked = _C.mark_arguments(self.leaves, self._kept, where, strict, for_compiled_run, self.names)
        if marked.refusal is not None and marked.refusal.obstacle == "not_xla":
            self.leaves = [_trees.without_wrapper(leaf) for leaf in self.leaves]
            marked = _C.mark_arguments(self.leaves, self._kept, where, strict, for_compiled_run, self.names)
        why = marked.refusal
        if why is None:
            return marked
        if why.kept is not None:
            _, kept = self._call.leaves(self._call.roles.kept)
            raise _marks.passed_twice(self.names.name(why.leaf), kept.name(why.kept))
        raise _marks.refusal(self.leaves[why.leaf], why.obstacle, self.names.name(why.leaf))
