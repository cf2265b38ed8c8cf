"""A donation that was requested, at a line of the program."""

from __future__ import annotations

from typing import NamedTuple

from torch_xla_donate import _config, _frames
from torch_xla_donate._checks import check_count
from torch_xla_donate._errors import see


def check_options(strict: _config.Strict, stacklevel: int) -> None:
    """Raises TypeError or ValueError for a bad argument of a public function."""
    _config.check_strict(strict)
    remedy = "Pass 1 for the line of the call, or 2 for the line that calls your helper. Nothing was donated."
    check_count("stacklevel", stacklevel, 1, f"{remedy} {see('refused')}")


class DonationRequest(NamedTuple):
    """A requested donation, before its tensor is marked.

    where: its ``file:line``.
    strict: as for `donate_buffer`.
    """

    where: str
    strict: _config.Strict

    @classmethod
    def make(cls, strict: _config.Strict, stacklevel: int) -> DonationRequest:
        """The request of the call of a public function. Raises TypeError or ValueError for a bad argument."""
        check_options(strict, stacklevel)
        return cls(_frames.call_site(stacklevel), strict)

    def strictness(self) -> _config.Strictness:
        """The effect of an unusable donation."""
        return _config.strictness(self.strict)
