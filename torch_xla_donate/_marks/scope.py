"""What this thread is tracing: a compiled function, or the body of a loop, whose tensors stand for its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_xla_donate import _host, _trace, _trees
from torch_xla_donate._errors import DonationError, see
from torch_xla_donate._host import interrupts
from torch_xla_donate._marks.request import DonationRequest

# Whether this thread is inside a call of a compiled function, which donates only its arguments.
inside_call: interrupts.PerThread[bool] = interrupts.per_thread(False)


def refuse_in_trace(function: str) -> None:
    """Raises DonationError in the trace of a pure function, whose replays would not call this function."""
    by = _trace.current_watcher.value
    if by is not None:
        raise by.refuse(f"calls {function}, which a replay would not do", "Call it outside")


class LoopBody:
    """The trace of one body, and its requests.

    Args:
        loop: the loop's name in messages, such as ``scan``.
        leaves: the traced tensors, in the order of the loop's arguments that they stand for.

    Attributes:
        requests: by the number of the argument; None if the body has cancelled its donation.
    """

    def __init__(self, loop: str, leaves: Iterable[Any]) -> None:
        self.loop = loop
        self._numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        self.requests: dict[int, DonationRequest | None] = {}

    def find(self, tensor: Any) -> int | None:
        """The number of the loop's argument that a tensor stands for; None if there is none."""
        return self._numbers.get(id(tensor))

    def argument(self, tensor: Any) -> int | None:
        """The same for a tensor to donate; None for a tensor from outside the trace.

        Raises DonationError for a tensor that the body has made.
        """
        number = self.find(tensor)
        if number is not None or not _host.is_traced(tensor):
            return number
        raise DonationError(
            f"tensors is {_trees.dtype_and_shape(tensor)}, which the body of {self.loop} has made or sliced, and XLA "
            "reuses its memory anyway. Donate an unchanged argument of the body. Nothing was marked. "
            f"{see('scan')}"
        )

    def donate(self, number: int, request: DonationRequest) -> None:
        """Notes the request for an argument of the loop. The first request holds, as with marks."""
        if self.requests.get(number) is None:
            self.requests[number] = request


# The body that this thread is tracing; None outside a body.
current_body: interrupts.PerThread[LoopBody | None] = interrupts.per_thread(None)
