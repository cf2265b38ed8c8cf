"""The donated leaves of one call, and their donation to a step or to runs of compiled graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch_xla

from torch_xla_donate import _C, _host, _marks, _report
from torch_xla_donate._compile.arguments import CallArguments
from torch_xla_donate._compile.base import Compiled
from torch_xla_donate._errors import DonationError, see

NOT_READ = _C.Reason("not_read")
Parts = Sequence[tuple[list[Any], Hashable]]  # `_trees.flatten_fast` for each argument, first the donated ones


def signature_of(leaves: list[Any]) -> _C.Signature:
    """The signature that a graph of these inputs is compiled for. Raises ValueError if only the device knows a size."""
    found = _C.signature(leaves)
    if found.dynamic:
        raise ValueError(
            "only the device knows the size of an argument, but a graph is compiled for fixed sizes. Use the lazy "
            f"backend, without pure=True. {see('pure')}"
        )
    return found


def leaves_of_call(call: CallArguments) -> tuple[list[Any], Parts]:
    """The leaves of donated arguments, then those of kept ones; and for each argument its part."""
    parts = call.flattened(call.roles.nonstatic)
    leaves = [leaf for found, _ in parts for leaf in found]
    return [_host.without_wrapper(leaf) for leaf in leaves] if _host.runtime().is_spmd() else leaves, parts


def mark_donated(
    compiled: Compiled, call: CallArguments, parts: Parts, where: str, *, for_compiled_run: bool
) -> _C.Call:
    """Marks all donated leaves of a call, or none. Steps ignore marks that are for a run of a compiled graph.

    Raises:
        ValueError: a leaf is not an XLA tensor, or shares its buffer with an argument that is not donated.
        DonationError: a leaf is pending.
        DonatedBufferError: a leaf has been donated already.
    """
    count = len(call.roles.donated)
    donated, kept = ([leaf for leaves, _ in some for leaf in leaves] for some in (parts[:count], parts[count:]))
    names = compiled.names(call, [structure for _, structure in parts[:count]])
    strict = compiled.strictness()
    marked = _C.mark_arguments(donated, kept, where, strict, for_compiled_run, names)
    if isinstance(marked, _C.Call):
        return marked
    if marked.kept is not None:
        _, kept_names = call.leaves(call.roles.kept)
        raise _marks.passed_twice(names.name(marked.leaf), kept_names.name(marked.kept))
    raise _marks.refusal(donated[marked.leaf], marked.obstacle, names.name(marked.leaf))


class RunDonation(_C.Scope):
    """The donated leaves of one call, which runs of compiled graphs inside this context may consume.

    A step knows all live tensors and pending work. A run of a compiled graph knows only its arguments. So this class
    first checks that nothing else holds the buffers. At the end of the context, donors that no
    run has consumed are unusable. An exception cancels the donation.

    Attributes:
        count: the number of donated leaves.
        unread: the reason for leaves that no graph has read.
    """

    def __init__(self, compiled: Compiled, call: CallArguments, parts: Parts, where: str) -> None:
        super().__init__()
        self._compiled, self._arguments, self._parts, self._where = compiled, call, parts, where
        self._refused: dict[int, _C.Reason] = {}
        self.count = sum(len(leaves) for leaves, _ in parts[: len(call.roles.donated)])
        self.unread = NOT_READ

    def enter(self) -> None:
        try:
            self._mark()
        except DonationError:
            torch_xla.sync()  # materialises pending arguments, as the lazy backend does
            self._mark()
        del self._arguments, self._parts  # the function may drop an argument
        self.refuse_shared()
        for leaf in self._call.constants:
            self._refused[leaf] = _C.Reason("constant")
        # The reason why this call donates nothing; False if it does.
        self._off = _report.no_donation()

    def _mark(self) -> None:
        self._call = mark_donated(self._compiled, self._arguments, self._parts, self._where, for_compiled_run=True)

    def finish(self) -> None:
        _C.end_call(self._call, {} if self._off else self._refused, self._off or self.unread, notify=not self._off)

    def leave(self, raised: bool) -> None:
        if raised and hasattr(self, "_call"):
            _C.cancel_call(self._call)

    def refuse_shared(self) -> None:
        """Refuses the leaves whose buffers something else holds. Runs pending work that may read them."""
        self._shared = set(_C.perhaps_shared(self._call))
        if self._shared:
            torch_xla.sync()  # also gives an unread clone a separate buffer
            self._shared = set(_C.perhaps_shared(self._call))
        for leaf in self._shared:
            self._refused[leaf] = _C.Reason("held_by_others")

    def newly_shared(self) -> list[int]:
        """The leaves that something else holds, or pending work reads, only since `refuse_shared`."""
        if self._shared.issuperset(_C.perhaps_shared(self._call)):
            return []
        gc.collect()  # a reference cycle may do that
        return [leaf for leaf in _C.perhaps_shared(self._call) if leaf not in self._shared]

    def choice(self) -> Hashable:
        """The key for the result of `positions`, in addition to the signature of the arguments."""
        return None if self._is_off() else frozenset(self._refused)

    def is_whole(self) -> bool:
        """Whether nothing has been refused."""
        return not self._is_off() and not self._refused

    def _is_off(self) -> bool:
        """Whether the call donates nothing, or the function has disabled donation since."""
        return bool(self._off) or _C.disabled()

    def positions(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """The arguments of a graph that its run may consume."""
        return () if self._is_off() else self._fit(arguments)

    def undonated(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """The arguments that the run would consume if the user had not disabled donation."""
        return self._fit(arguments) if _C.disabled() else ()

    def _fit(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        return tuple(position for position, leaf in _C.marked_by(self._call, arguments) if leaf not in self._refused)

    def refuse(self, arguments: Sequence[Any], reason: _C.Reason) -> bool:
        """Refuses these arguments for the whole call. Returns whether this is new for one of them."""
        before = len(self._refused)
        for _, leaf in _C.marked_by(self._call, arguments):
            self._refused.setdefault(leaf, reason)
        return len(self._refused) > before

    def refuse_all(self, reason: _C.Reason) -> None:
        """Refuses all donated leaves of the call, for this reason."""
        for leaf in range(self.count):
            self._refused.setdefault(leaf, reason)

    @contextlib.contextmanager
    def consumed(
        self,
        donors: Sequence[torch.Tensor],
        graph: str,
        places: Sequence[tuple[int | None, int | None]],
        consumes: bool,
    ) -> Iterator[None]:
        """The run of a graph in this context consumes the donors. Without `consumes` the hooks only note them.

        places: for each donor its parameter number, and the number of the output computed from it; None if unknown.
        """
        if not donors:
            yield
            return
        if not _C.arm_run(self._call, donors, graph, places, consumes):
            raise _cancelled_meanwhile()
        try:
            yield
        finally:
            _C.disarm_run()


class RepeatedCall(_C.Scope):
    """The donation of a call that begins as an earlier one did.

    Attributes:
        begun: None if it differs from that call, with nothing marked.
    """

    begun: _C.Begun | None = None

    def __init__(self, replay: _C.Replay, call: CallArguments, where: str, strict: int) -> None:
        super().__init__()
        self._replay, self._values, self._where, self._strict = replay, call.values(call.roles.nonstatic), where, strict

    def enter(self) -> None:
        self.begun = self._replay.begin(self._values, self._where, self._strict)
        del self._values  # the function may drop an argument
        if self.begun is not None and not self.begun.armed:
            raise _cancelled_meanwhile()

    def finish(self) -> None:
        if self.begun is not None:
            _C.end_call(self.begun, {}, NOT_READ, notify=True)

    def leave(self, raised: bool) -> None:
        if self.begun is not None:
            _C.disarm_run()
            if raised:
                _C.cancel_call(self.begun)


def _cancelled_meanwhile() -> DonationError:
    return DonationError(
        "another thread has called cancel_donation for an argument while a compiled function was about to donate it. "
        f"Cancel a donation before the call. Nothing was donated. {see('cancel_donation')}"
    )
