"""Runs of compiled graphs outside of a step: the marks of one call, and which of them a run may consume."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch_xla

from torch_xla_donate import _C, _host, _report
from torch_xla_donate._compile.donated import NOT_READ, DonatedArguments
from torch_xla_donate._errors import DonationError

_numbers = itertools.count(1)


def new_graph_name() -> str:
    """A name for a graph that was compiled outside of a step: the report knows it by that."""
    return f"run-{next(_numbers)}"


class RunDonation:
    """The donated leaves of one call, to be consumed by the runs of compiled graphs in it.

    A step knows all live tensors and what is pending; a run of a compiled graph knows its arguments alone. So before
    anything is offered it is made sure that nobody else needs these buffers.
    """

    def __init__(self, donated: DonatedArguments, args: Sequence[Any], kwargs: Mapping[str, Any], where: str) -> None:
        self._refused: dict[int, str] = {}
        self._count = len(donated.leaves)
        try:
            self._call = donated.mark(args, kwargs, where, for_compiled_run=True)
        except DonationError:
            torch_xla.sync()  # an argument that was pending is none any more, as with the lazy backend
            self._call = donated.mark(args, kwargs, where, for_compiled_run=True)
        try:
            self._refuse_shared()
        except BaseException:
            self.cancel()
            raise
        for leaf in self._call.constants:
            self._refused[leaf] = _report.CONSTANT
        # Why this call donates nothing at all; empty if it does.
        self._off = _report.no_donation()
        self.unread = NOT_READ  # why what no graph has read was not donated

    def _refuse_shared(self) -> None:
        if not _C.perhaps_shared(self._call):
            return
        if _host.list_live_tensors():
            torch_xla.sync()  # what is pending may read them
            _host.list_live_tensors()
        shared = _C.shared_with_listed(self._call)
        if shared:
            torch_xla.sync()  # which gives a clone that nobody has read yet a buffer of its own
            _host.list_live_tensors()
            shared = _C.shared_with_listed(self._call)
        for leaf in shared:
            self._refused[leaf] = _report.HELD_BY_OTHERS

    def choice(self) -> Hashable:
        """What `positions` depends on beyond the kind of the arguments and which of them share a buffer."""
        return None if self._off else frozenset(self._refused)

    def positions(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """Which arguments of a graph may be consumed by its run."""
        return () if self._off else self._fit(arguments)

    def spared(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """Which of them would be consumed if the user had not disabled donation."""
        return self._fit(arguments) if _C.disabled() else ()

    def _fit(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        return tuple(position for position, leaf in _C.marked_by(self._call, arguments) if leaf not in self._refused)

    def refuse(self, arguments: Sequence[Any], reason: str) -> bool:
        """These arguments stay, for this reason, whatever else the call runs. Whether one was not refused before."""
        before = len(self._refused)
        for _, leaf in _C.marked_by(self._call, arguments):
            self._refused.setdefault(leaf, reason)
        return len(self._refused) > before

    def refuse_all(self, reason: str) -> None:
        """Nothing of the call may be consumed, for this reason."""
        for leaf in range(self._count):
            self._refused.setdefault(leaf, reason)

    @contextlib.contextmanager
    def consumed(
        self, donors: Sequence[torch.Tensor], graph: str, places: Sequence[tuple[int | None, int | None]]
    ) -> Iterator[None]:
        """The run of a graph in this context consumes the donors; the hooks remember them where they are spared.

        places: of each donor among the graph's parameters, and of the output computed from it; None where unknown.
        """
        if not donors:
            yield
            return
        _C.arm_run(self._call, donors, graph, places)
        try:
            yield
        finally:
            _C.disarm_run()

    def keep_returned(self, leaves: Sequence[Any]) -> None:
        """What a function returns as it came stays as it is."""
        _C.keep_returned(list(leaves))

    def cancel(self) -> None:
        _C.cancel_call(self._call)

    def end(self) -> None:
        """The call is over: what no run has consumed was unusable."""
        _C.end_call(self._call, {} if self._off else self._refused, self._off or self.unread, notify=not self._off)
