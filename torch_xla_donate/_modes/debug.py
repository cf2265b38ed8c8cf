"""debug_nans: disables donation, checks outputs, and reports uses that donation would forbid."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence

from torch_xla_donate import _C, _config, _report
from torch_xla_donate._errors import DonationError, DonationWarning, see
from torch_xla_donate._host import interrupts
from torch_xla_donate._locks import make_lock
from torch_xla_donate._modes.context import SwitchMode, donation_disabled
from torch_xla_donate._text import cut

_SHOWN = 5


class debug_nans(donation_disabled):
    """Steps of this thread inside the context donate nothing, and raise if an output is NaN.

    The end of each step (``torch_xla.sync()``, ``xm.mark_step()``) fetches the outputs of a floating or complex dtype
    and checks them. It also checks the outputs of graphs of ``torch.compile(backend="openxla")`` that ran since the
    last step. The end of the context checks the rest. Reads (``print``, ``.item()``) are not steps. Each step waits for
    the device.

    The inputs of a step that raised still exist, so you can run the step again line by line. A `DonationWarning`
    reports each use of a tensor that a step would have consumed, as with ``donation_disabled(report_reuse=True)``.
    torch_xla still reuses the memory of tensors that are updated in place. Their old values are out of reach in any
    case. After the context steps donate again, and no graph is compiled again.

    The environment variable ``TORCH_XLA_DONATE_DEBUG_NANS=1``, read at import, does this for all threads of a process.

    Args:
        infs: whether to check for infinities, too. An inner context adds to the checks of the outer one.

    Raises:
        FloatingPointError: an output has a NaN. Raised at the end of a step, or of the context. The text shows the
            first five outputs; the attribute ``outputs`` has a text for each. Outputs of a function made by `compile`
            have their path in its result, such as ``result['loss']``, or the name of the argument updated in place.
    """

    def __init__(self, *, infs: bool = False) -> None:
        SwitchMode.__init__(self, disabled=True, report_reuse=True, check_outputs=True, check_infinities=infs)

    def finish(self) -> None:
        check_outputs()


def check_outputs(names: Callable[[], Mapping[int, str]] = dict) -> None:
    """Raises FloatingPointError if an output since the last check is not finite.

    names: returns the names of outputs by their buffers, as far as they have names.
    """
    bad = _C.take_bad_outputs()
    if bad:
        name_of = names()
        lines = [_line(raw, name_of.get(raw["buffer"], "")) for raw in bad]
        error = FloatingPointError(_text(lines))
        error.outputs = tuple(lines)  # type: ignore[attr-defined]
        try:
            raise error
        finally:
            del error  # it refers to this frame, and so to the frames of the program and their tensors


StepListener = Callable[[_C.WatchedStep], None]
_listener: interrupts.PerThread[StepListener | None] = interrupts.per_thread(None)
_listening = make_lock()


def listening(listener: StepListener) -> interrupts.Switched[StepListener | None]:
    """A context in which a function is called with each step of this thread. Other threads wait to enter one."""

    def write(value: StepListener | None) -> None:
        _listener.value = value
        _C.watch_inputs(value is not None)

    return interrupts.Switched(lambda: _listener.value, write, listener, _listening)


def note_error(error: Exception) -> None:
    """Notes an error of a listener for the report. The program continues."""
    _C.note_error(f"advise: {type(error).__name__}: {error}")


def step_ended() -> None:
    """Reports and checks at the end of a step. The hooks call it if there is something to report or to check."""
    step, listener = _C.take_watched_step(), _listener.value
    if step is not None and listener is not None:
        try:
            listener(step)
        except Exception as error:
            note_error(error)
    if _report.postponed.value:
        return
    try:
        _report.warn_or_raise()
    except (DonationError, DonationWarning):
        check_outputs()
        raise
    check_outputs()


def _line(raw: _C._BadOutput, name: str) -> str:
    run = "a compiled graph" if raw["compiled"] else "the step"
    counts = [f"{count:,} {kind}" for count, kind in ((raw["nans"], "NaN"), (raw["infs"], "infinite")) if count]
    place = f"output {raw['index']} of {raw['outputs']} of {run}"
    return (
        f"{f'{name} ({place})' if name else place}, {raw['array']}: "
        f"{' and '.join(counts)} of {raw['values']:,} value{'s' if raw['values'] != 1 else ''}"
    )


def _text(bad: Sequence[str]) -> str:
    lines = [f"{len(bad)} output{'s are' if len(bad) > 1 else ' is'} not finite."]
    lines += [f"  {line}." for line in cut(bad, _SHOWN)]
    lines.append(
        "  Nothing was donated, so the inputs are still there. Run the step again with torch_xla.sync() after each "
        f"line. {see('debug_nans')}"
    )
    return "\n".join(lines)


def start() -> None:
    """Switches the checks on for the process if the environment does. Raises ValueError for neither yes nor no."""
    if _config.flag("TORCH_XLA_DONATE_DEBUG_NANS"):
        _C.set_debug_process(True)
        atexit.register(_check_at_exit)


def _check_at_exit() -> None:
    # A graph may run after the last step.
    try:
        check_outputs()
    except FloatingPointError as error:
        print(f"FloatingPointError: {error}", file=sys.stderr)
