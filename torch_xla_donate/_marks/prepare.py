"""What has to be right before a tensor is marked."""

from __future__ import annotations

from torch_xla_donate import _C, _host, _report
from torch_xla_donate._errors import DonationError, see, warn


def prepare(where: str) -> None:
    """Before a mark at ``where``: hooks and layouts must be right, and a setting that ignores donors is told.

    Raises:
        DonationError: the hooks have been taken out.
        ImportError: the layouts are not those relied on.
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
        # There may be no step at whose end this would be told.
        _report.warn_or_raise()


_warned_settings: set[str] = set()
