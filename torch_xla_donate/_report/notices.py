"""Warnings and errors of unusable donations, and of uses that donation would have made errors."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence

from torch_xla_donate import _C, _config, _frames
from torch_xla_donate._errors import DonationError, DonationWarning, describe_reuse, see, warn
from torch_xla_donate._host import interrupts
from torch_xla_donate._report.donors import describe_donors
from torch_xla_donate._text import cut

# Whether steps of this thread report nothing.
postponed = interrupts.per_thread(False)


def postpone_notices() -> interrupts.Switched[bool]:
    """A context in which steps of this thread report nothing, because an exception would interrupt torch_xla."""
    return postponed.replaced(True)


_warned_sites: set[str] = set()


def warn_once(message: str, where: str) -> None:
    """Warns, unless there was a warning for this line before."""
    if where not in _warned_sites:
        _warned_sites.add(where)
        warn(message, where)


def warn_or_raise(*, everywhere: bool = False) -> None:
    """Warns of unusable donations, once for each line. Raises DonationError for strict donations.

    The hooks call this at the end of a step that has something to report. Inside `postpone_notices` it does nothing.

    Args:
        everywhere: whether to report for all devices, or only for the device of this thread's last step.
            `torch_xla.launch` runs a thread for each device, and each thread gets the errors of its device.
    """
    if postponed.value:
        return
    failures: list[str] = []
    raised: list[BaseException] = []
    for step in _C.take_notices(everywhere):
        due = _by_site(step, lambda raw: raw["strict"] > _config.Strictness.OFF and not raw["reported"])
        for where, unusable in due:
            message = _unusable_text(where, unusable, step)
            if any(raw["strict"] == _config.Strictness.ERROR for raw in unusable):
                failures.append(message)
            else:
                try:
                    warn_once(message, where)
                except BaseException as error:  # a filter turns warnings into errors; first report the others
                    raised.append(error)
    refused = DonationError("\n".join(failures)) if failures else None
    # Any other exception came from elsewhere, such as a signal's handler, and has to reach the program.
    foreign = next((error for error in raised if not isinstance(error, DonationWarning)), None)
    try:
        if foreign is not None:
            raise foreign from refused or foreign.__cause__
        if refused is not None:
            raise refused from next(iter(raised), None)
        if raised:
            raise raised[0]
    finally:  # an error refers to this frame, and so to the frames of the program and their tensors
        del foreign, refused, raised


def raise_with_notices(failure: Exception | None, *, everywhere: bool = False) -> None:
    """Calls `warn_or_raise`, then raises a failure, if there is one. An error of the notices becomes its cause."""
    try:
        warn_or_raise(everywhere=everywhere)
        if failure is not None:
            raise failure
    except (DonationError, DonationWarning) as error:
        if failure is None or error is failure:
            raise
        raise failure from error
    finally:
        del failure


def _by_site(step: _C._Step, includes: Callable[[_C._Donor], bool]) -> Iterable[tuple[str, list[_C._Donor]]]:
    """The unusable donors of a step by the line of their donation."""
    found: dict[str, list[_C._Donor]] = {}
    for raw in step["donors"]:
        if raw["outcome"] == "unusable" and includes(raw):
            found.setdefault(raw["where"], []).append(raw)
    return found.items()


def unusable_texts(step: _C._Step) -> list[str]:
    """A text for each line with unusable donations in a step, also if they were reported before."""
    lines = _by_site(step, lambda raw: not raw["automatic"])
    return [_unusable_text(where, unusable, step) for where, unusable in lines]


@atexit.register  # after the last step of a program no later step reports its donations
def print_notices() -> None:
    """Warns of the unusable donations of all threads, and prints the errors to standard error."""
    _C.wait_for_steps()
    try:
        warn_or_raise(everywhere=True)
    except (DonationError, DonationWarning) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


_SHOWN = 5


def _unusable_text(where: str, unusable: Sequence[_C._Donor], step: _C._Step) -> str:
    donors = describe_donors(unusable[:_SHOWN], step)
    arrays = ", ".join(cut([raw["shape"] for raw in unusable], _SHOWN, "and {:,} more"))
    lines = [f"Some donated buffers were not usable: {arrays} (donated at {where}, step {step['number']})."]
    for donor in donors:
        lines.append(f"  {donor.array}{f' {donor.name}' if donor.name else ''}: {donor.reason}.")
    lines.append(f"  They stay readable. {see('unusable')}")
    return "\n".join(lines)


_reported: set[tuple[str, str, int]] = set()


def report_reuse(name: str, array: str, where: str, step: int) -> None:
    """Warns of the running use, once for each pair of a donating and a using line.

    The hooks call this inside the operation. If a filter turns the warning into an error, the operation raises it.
    """
    frame = _frames.user_frame()
    if frame is None:
        filename, _, line = where.rpartition(":")
        module, lineno = "<unknown>", int(line)
    else:
        filename, lineno = frame.f_code.co_filename, frame.f_lineno
        module = frame.f_globals.get("__name__", "<unknown>")
    key = (where, filename, lineno)
    if key in _reported:
        return
    warnings.warn_explicit(describe_reuse(name, array, where, step), DonationWarning, filename, lineno, module)
    # Not reached if the warning is an error, so each use raises.
    _reported.add(key)
