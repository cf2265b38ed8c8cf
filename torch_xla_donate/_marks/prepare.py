"""Checks hooks, layouts and settings before a tensor is marked."""

from __future__ import annotations

from torch_xla_donate import _C, _host, _report
from torch_xla_donate._errors import DonationError, see, warn


def prepare(where: str) -> None:
    """Checks hooks and layouts before a mark at ``where``. Warns of a setting that makes torch_xla ignore donors.

    Raises:
        DonationError: the hooks have been removed.
        ImportError: the layouts differ from the expected ones.
    """
    if not _C.installed():
        raise DonationError(
            "the hooks of torch_xla_donate have been removed from torch_xla, so nothing can be donated. "
            f"Start a new process to install them again. {see('refused')}"
        )
    _host.verify_layouts()
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


_warned_settings: set[str] = set()
