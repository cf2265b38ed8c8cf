"""The donation of one call to compiled graphs that run outside a step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
import torch_xla

from torch_xla_donate import _C, _host, _report
from torch_xla_donate._compile.donated import NOT_READ, DonatedArguments
from torch_xla_donate._errors import DonationError, see

_numbers = itertools.count(1)


def new_graph_name() -> str:
    """A name in the report for a graph that was compiled outside a step."""
    return f"run-{next(_numbers)}"


class RunDonation:
    """The donated leaves of one call, which runs of compiled graphs in the call may consume.

    A step knows all live tensors and pending work. A run of a compiled graph knows only its arguments. So this class
    first checks that no live tensor and no pending work needs the buffers.
    """

    def __init__(self, donated: DonatedArguments, where: str) -> None:
        self._refused: dict[int, _C.Reason] = {}
        self._count = len(donated.leaves)
        try:
            self._call = donated.mark(where, for_compiled_run=True)
        except DonationError:
            torch_xla.sync()  # materialises pending arguments, as the lazy backend does
            self._call = donated.mark(where, for_compiled_run=True)
        try:
            self.refuse_shared()
        except BaseException:
            self.cancel()
            raise
        for leaf in self._call.constants:
            self._refused[leaf] = _C.Reason("constant")
        # The reason why this call donates nothing; False if it does.
        self._off = _report.no_donation()
        self.unread = NOT_READ  # the reason for leaves that no graph has read

    def refuse_shared(self) -> None:
        """Refuses the leaves whose buffers other live tensors hold. Runs pending work that may read them."""
        if not _C.perhaps_shared(self._call):
            return
        if _host.list_live_tensors():
            torch_xla.sync()  # pending work may read them
            _host.list_live_tensors()
        shared = _C.shared_with_listed(self._call)
        if shared:
            torch_xla.sync()  # gives an unread clone a separate buffer
            _host.list_live_tensors()
            shared = _C.shared_with_listed(self._call)
        for leaf in shared:
            self._refused[leaf] = _C.Reason("held_by_others")

    def choice(self) -> Hashable:
        """The key for the result of `positions`, in addition to the signature of the arguments."""
        return None if self._off else frozenset(self._refused)

    def positions(self, arguments: Sequence[Any]) -> tuple[int, ...]:
        """The arguments of a graph that its run may consume."""
        return () if self._off else self._fit(arguments)

    def spared(self, arguments: Sequence[Any]) -> tuple[int, ...]:
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
        for leaf in range(self._count):
            self._refused.setdefault(leaf, reason)

    @contextlib.contextmanager
    def consumed(
        self, donors: Sequence[torch.Tensor], graph: str, places: Sequence[tuple[int | None, int | None]]
    ) -> Iterator[None]:
        """The run of a graph in this context consumes the donors. If donation is disabled, the hooks only note them.

        places: for each donor its parameter number, and the number of the output computed from it; None if unknown.
        """
        if not donors:
            yield
            return
        if not _C.arm_run(self._call, donors, graph, places):
            raise DonationError(
                "another thread has called cancel_donation for an argument while a compiled function was about to "
                f"donate it. Cancel a donation before the call. Nothing was donated. {see('cancel_donation')}"
            )
        try:
            yield
        finally:
            _C.disarm_run()

    def cancel(self) -> None:
        _C.cancel_call(self._call)

    def end(self) -> None:
        """Ends the call. Donors that no run has consumed are unusable."""
        _C.end_call(self._call, {} if self._off else self._refused, self._off or self.unread, notify=not self._off)
