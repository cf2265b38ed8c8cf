"""donation_disabled: steps that donate nothing."""

from __future__ import annotations

from torch_xla_donate import _C
from torch_xla_donate._modes.context import ThreadMode


class donation_disabled(ThreadMode[_C.Disabling]):
    """Steps of this thread inside the context donate nothing through this package.

    A mark ends at a step that reads it, as always. The report gives the reason, without a warning. torch_xla still
    reuses the memory of tensors that are updated in place.

    Args:
        report_reuse: whether a `DonationWarning` reports each use of a tensor that such a step would have consumed, at
            the line of the use, also after the context. The value is right, and stays. XLA would have consumed the
            donors whose bytes per device an output has, in the order of the graph's parameters. An inner context adds
            to the outer one.

    Raises:
        TypeError: as a decorator, if the function is a generator or ``async def`` function.
    """

    def __init__(self, *, report_reuse: bool = False) -> None:
        super().__init__()
        self._report_reuse = report_reuse
        self._checks = False
        self._options = {"report_reuse": report_reuse}

    def _recreate_cm(self) -> donation_disabled:
        return type(self)(**self._options)

    def make_entry(self) -> _C.Disabling:
        return _C.Disabling(self._report_reuse, self._checks)

    def switch_on(self, entry: _C.Disabling) -> None:
        entry.on()

    def switch_off(self, entry: _C.Disabling) -> None:
        entry.off()
