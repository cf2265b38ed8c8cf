"""A donation that the body of a loop requests."""

from __future__ import annotations

from typing import NamedTuple

from torch_xla_donate import _config


class DonationRequest(NamedTuple):
    """A requested donation, before its tensor is marked.

    where: its ``file:line``.
    strict: as for `donate_buffer`.
    """

    where: str
    strict: bool | None

    def is_strict(self) -> bool:
        """Whether an unusable donation raises."""
        return _config.is_strict(self.strict)
