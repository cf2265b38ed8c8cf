"""A donation that the body of a loop asks for."""

from __future__ import annotations

from typing import NamedTuple

from torch_xla_donate import _config


class DonationRequest(NamedTuple):
    """A donation that waits for its loop to be called.

    where: its ``file:line``.
    strict: as for `donate_buffer`.
    """

    where: str
    strict: bool | None

    def is_strict(self) -> bool:
        """Whether it raises if it cannot be used."""
        return _config.strict_by_default() if self.strict is None else self.strict
