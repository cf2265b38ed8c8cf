"""donation_disabled: steps that donate nothing."""

from __future__ import annotations

import contextlib

from torch_xla_donate import _C


class donation_disabled(_C.Scope, contextlib.ContextDecorator):
    """Steps of this thread inside the context donate nothing through this package.

    A mark ends at a step that reads it, as always. The report gives the reason, without a warning. torch_xla still
    reuses the memory of tensors that are updated in place.

    Args:
        report_reuse: whether a `DonationWarning` reports each use of a tensor that such a step would have consumed, at
            the line of the use, also after the context. The value is right, and stays. A prediction decides which
            donors XLA would have consumed: it compares bytes per device of donors and outputs, in the order of the
            graph's parameters. An inner context adds to the outer one.
    """

    def __init__(self, *, report_reuse: bool = False) -> None:
        super().__init__()
        self._report_reuse = report_reuse
        self._checks = False
        self._options = {"report_reuse": report_reuse}
        self._open: list[_C.Disabling] = []  # one for each time that the context was entered

    def _recreate_cm(self) -> donation_disabled:
        return type(self)(**self._options)

    def enter(self) -> None:
        self._open.append(_C.Disabling(self._report_reuse, self._checks))
        self._open[-1].on()

    def leave(self, raised: bool) -> None:
        if self._open:
            self._open[-1].off()
            self._open.pop()
