"""A donation that was requested, at a line of the program, and the checks before the mark."""

from __future__ import annotations

from typing import NamedTuple

from torch_xla_donate import _C, _config, _frames, _host, _report
from torch_xla_donate._checks import check_count
from torch_xla_donate._errors import DonationError, see, warn


def check_options(strict: _config.Strict, stacklevel: int) -> None:
    """Raises TypeError or ValueError for a bad argument of a public function."""
    if strict is None and type(stacklevel) is int and stacklevel > 0:  # as mostly: the text below takes longer
        return
    _config.check_strict(strict)
    remedy = "Pass 1 for the line of the call, or 2 for the line that calls your helper. Nothing was donated."
    check_count("stacklevel", stacklevel, f"{remedy} {see('refused')}")


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


def prepare(where: str) -> bool:
    """Checks hooks and layouts before a mark at ``where``. Warns of a setting that makes torch_xla ignore donors.

    Returns whether no variable or setting changes what a mark does, `TORCH_XLA_DONATE_STRICT` included.

    Raises:
        DonationError: the hooks have been removed.
        ImportError: the layouts differ from the expected ones.
    """
    ready = _host.is_ready()
    if not ready and not _C.installed():
        raise DonationError(
            "the hooks of torch_xla_donate have been removed from torch_xla, so nothing can be donated. "
            f"Start a new process to install them again. {see('refused')}"
        )
    _host.verify_layouts()
    if ready:
        return True
    setting = _host.ignores_donors()
    if setting and setting not in _warned_settings:
        _warned_settings.add(setting)
        warn(
            f"{setting} switches donation off in torch_xla for the whole process, so steps keep the marked buffers. "
            f"Unset it to donate. {see('switched_off')}",
            where,
        )
    if _C.has_notices() and _host.in_eager_mode():
        # Eager mode may have no later step that would report it.
        _report.warn_or_raise()
    return False


_warned_settings: set[str] = set()
