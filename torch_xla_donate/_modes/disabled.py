"""donation_disabled: steps that donate nothing."""

from __future__ import annotations

import contextlib

from torch_xla_donate import _C


class donation_disabled(_C.Scope, contextlib.ContextDecorator):
    """Steps of this thread inside the context donate nothing of this package's.

    A mark that such a step reads is over, as always; the report gives the reason. No warning is made of it. What
    torch_xla aliases by itself (in-place updates) stays as it is.

    Args:
        report_reuse: whether the use of a tensor that such a step would have consumed is told by a `DonationWarning` at
            the line of the use, also after the context has been left. The value is right, and stays. Whether XLA would
            have consumed a donor is predicted: by the bytes per device of donors and outputs, in the order of the
            graph's parameters. Inside another context: in addition to what that one asks for.
    """

    def __init__(self, *, report_reuse: bool = False) -> None:
        super().__init__()
        self._report_reuse = report_reuse
        self._checks = False
        self._options = {"report_reuse": report_reuse}
        self._open: list[_C.Disabling] = []  # for each time that it has been entered

    def _recreate_cm(self) -> donation_disabled:
        return type(self)(**self._options)

    def enter(self) -> None:
        self._open.append(_C.Disabling(self._report_reuse, self._checks))
        self._open[-1].on()

    def leave(self, raised: bool) -> None:
        if self._open:
            self._open[-1].off()
            self._open.pop()
