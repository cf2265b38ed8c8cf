"""A donation that was requested, at a line of the program."""

from __future__ import annotations

from typing import NamedTuple

from torch_xla_donate import _config, _frames
from torch_xla_donate._errors import see


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
        _config.check_strict(strict)
        if isinstance(stacklevel, bool) or not isinstance(stacklevel, int):
            raise TypeError(
                f"stacklevel is of type {type(stacklevel).__name__}, not an int. Pass 1 for the line of the call, or 2 "
                f"for the line that calls your helper. Nothing was donated. {see('refused')}"
            )
        if stacklevel < 1:
            raise ValueError(
                f"stacklevel is {stacklevel}. Pass 1 for the line of the call, or 2 for the line that calls your "
                f"helper. Nothing was donated. {see('refused')}"
            )
        return cls(_frames.call_site(stacklevel), strict)

    def strictness(self) -> _config.Strictness:
        """The effect of an unusable donation."""
        return _config.strictness(self.strict)
