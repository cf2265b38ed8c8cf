"""configure: how many steps the report keeps, and the size from which unusable donors are reported."""

from __future__ import annotations

import sys

from torch_xla_donate import _C, _config
from torch_xla_donate._checks import check_count
from torch_xla_donate._errors import see


class _Settings:
    kept_steps = 8
    warn_min_bytes = 0


_settings = _Settings()


def kept_steps() -> int:
    """How many steps the report can look back."""
    return _settings.kept_steps


def configure(*, kept_steps: int | None = None, warn_min_bytes: int | None = None) -> dict[str, int]:
    """Changes settings of the report, for all threads. None keeps a setting.

    Args:
        kept_steps: how many of the last steps `donation_report` can show, 1 or more. Initially 8, or the environment
            variable ``TORCH_XLA_DONATE_KEPT_STEPS``. A kept step takes memory for each of its donors.
        warn_min_bytes: an unusable donor of fewer bytes (of the whole array) does not matter: it neither warns nor
            raises, also if it is strict, and does not fail `testing.no_unusable_donation`. The report shows it, and
            `expect_donated` counts its bytes. A mark keeps the value of the moment when it is made. Initially 0, or
            ``TORCH_XLA_DONATE_WARN_MIN_BYTES``.

    Returns:
        The settings before, so that ``configure(**before)`` restores them.

    Raises:
        TypeError: a value is not an int.
        ValueError: ``kept_steps`` is not positive, or ``warn_min_bytes`` is negative.
    """
    before = {"kept_steps": _settings.kept_steps, "warn_min_bytes": _settings.warn_min_bytes}
    for name, value, least in (("kept_steps", kept_steps, 1), ("warn_min_bytes", warn_min_bytes, 0)):
        if value is not None:
            check_count(name, value, least, f"Pass {least} or more, or None to keep the setting. {see('report')}")
    if kept_steps is not None:
        _settings.kept_steps = int(kept_steps)
        _C.set_kept_steps(min(_settings.kept_steps, sys.maxsize))
    if warn_min_bytes is not None:
        _settings.warn_min_bytes = int(warn_min_bytes)
        _C.set_warn_min_bytes(min(_settings.warn_min_bytes, sys.maxsize))
    return before


def start() -> None:
    """Takes the settings of the environment. Raises ValueError if one is not a number."""
    configure(kept_steps=_config.kept_steps(), warn_min_bytes=_config.warn_min_bytes())
