"""debug_nans: donation off, outputs checked, uses of what would have been donated told."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from torch_xla_donate import _C, _config, _report
from torch_xla_donate._errors import DonationError, DonationWarning, see
from torch_xla_donate._modes.disabled import donation_disabled


class _Infinities(threading.local):
    def __init__(self) -> None:
        self.contexts: list[debug_nans] = []  # contexts of this thread that ask for infinities


_infinities = _Infinities()
_SHOWN = 5


class debug_nans(donation_disabled):
    """Steps of this thread inside the context donate nothing, and raise where an output is NaN.

    At the end of each step (``torch_xla.sync()``, ``xm.mark_step()``) its outputs of a floating or complex dtype are
    fetched and looked at, and so are those of graphs that ``torch.compile(backend="openxla")`` has made and that ran
    since the last step; what no step has checked is checked when the context is left. Reads (``print``, ``.item()``)
    are not steps. Each step waits for the device.

    As nothing is donated, the inputs of a step that raised are still there, and the step can be run again line by
    line. In all other steps the use of a tensor that would have been donated is told, as with
    ``donation_disabled(report_reuse=True)``. What torch_xla aliases by itself stays as it is: the old value of a tensor
    that is updated in place cannot be reached with or without it. Leaving the context donates again; no graph is
    compiled anew.

    ``TORCH_XLA_DONATE_DEBUG_NANS=1``, read when the package is imported, does the same for a whole process and all its
    threads.

    Args:
        infs: whether infinities count, too. Inside another context: in addition to what that one asks for.

    Raises:
        FloatingPointError: at the end of a step, or when the context is left, if an output has a NaN. The text has the
            first of them; the attribute ``outputs`` has a text for each.
    """

    def __init__(self, *, infs: bool = False) -> None:
        super().__init__(report_reuse=True)
        self._checks = True
        self._options = {"infs": infs}
        self._infs = infs

    def enter(self) -> None:
        super().enter()
        if self._infs:
            _infinities.contexts.append(self)

    def finish(self) -> None:
        check_outputs()

    def leave(self, raised: bool) -> None:
        if self in _infinities.contexts:
            _infinities.contexts.remove(self)
        super().leave(raised)


def check_outputs() -> None:
    """Raises FloatingPointError if an output that was noted since the last check is not finite."""
    bad = _C.take_bad_outputs(bool(_infinities.contexts))
    if bad:
        error = FloatingPointError(_text(bad))
        error.outputs = tuple(_line(raw) for raw in bad)  # type: ignore[attr-defined]
        raise error


def step_ended() -> None:
    """The hooks call this at the end of a step, if there is something to tell or to check."""
    if _report.is_postponed():
        return
    try:
        _report.warn_or_raise()
    except (DonationError, DonationWarning):
        check_outputs()
        raise
    check_outputs()


def _line(raw: Mapping[str, Any]) -> str:
    run = "a compiled graph" if raw["compiled"] else "the step"
    counts = [f"{raw[key]:,} {name}" for key, name in (("nans", "NaN"), ("infs", "infinite")) if raw[key]]
    return (
        f"output {raw['index']} of {raw['outputs']} of {run}, {raw['array']}: "
        f"{' and '.join(counts)} of {raw['values']:,} value{'s' if raw['values'] != 1 else ''}"
    )


def _text(bad: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{len(bad)} output{'s are' if len(bad) > 1 else ' is'} not finite."]
    lines += [f"  {_line(raw)}." for raw in bad[:_SHOWN]]
    if len(bad) > _SHOWN:
        lines.append(f"  ... and {len(bad) - _SHOWN} more.")
    lines.append(
        "  Nothing was donated, so the inputs are still there. Run the step again with torch_xla.sync() after each "
        f"line. {see('debug_nans')}"
    )
    return "\n".join(lines)


def start() -> None:
    """Switches the checks on for the process if the environment says so. ValueError if it says neither yes nor no."""
    if _config.debug_nans():
        _C.set_debug_process(True)
        atexit.register(_check_at_exit)


def _check_at_exit() -> None:
    # A graph that ran after the last step has no next one at whose end it could be told.
    try:
        check_outputs()
    except FloatingPointError as error:
        print(f"FloatingPointError: {error}", file=sys.stderr)
