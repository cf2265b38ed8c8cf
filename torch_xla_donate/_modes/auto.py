"""auto_donate: inputs that nothing can read after the step are donated without being marked."""

from __future__ import annotations

import threading
import weakref

from torch_xla_donate import _C, _config, _host
from torch_xla_donate._errors import see


class auto_donate(_C.Scope):
    """Donates every input of a step that no live tensor can reach once the step has run.

    Called as a function it holds for all threads from now on. As a context manager it holds for the steps that this
    thread runs inside, whatever the process does otherwise; ``with auto_donate(False)`` leaves a part out. The
    environment variable ``TORCH_XLA_DONATE_AUTO=1``, read when the package is imported, is as a call before
    everything else.

    At a step (``torch_xla.sync()``, ``xm.mark_step()``, the end of a ``torch_xla.compile``d function) torch_xla lists
    all live tensors of the device. An input of the step's graph that none of them holds, by its buffer, as a view or
    through work that is still pending, can never be read again: it joins the donor set, if an output of its size is
    there to take it. Nothing is donated that torch_xla shares between tensors, and nothing in `donation_disabled` or
    `debug_nans`. Marks of `donate_buffer` come first. `donation_report` shows automatic donors as such, and says where
    a step was left alone.

    Nothing changes in what a program computes, and there are no warnings of automatic donors. Which inputs are out of
    reach follows from the live tensors, so that a steady loop compiles once; where these differ from step to step (the
    garbage collector frees a cycle now and then) a graph is compiled for at most six sets of donors, and the one that
    fits is taken from then on.

    Runs of compiled graphs (``torch.compile``, ``compile(pure=True)``) are no steps: their inputs are arguments, which
    the caller holds.

    Args:
        enabled: whether to donate.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """

    def __init__(self, enabled: bool = True) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(
                f"enabled is of type {type(enabled).__name__}, not a bool. Pass True or False, or mark tensors with "
                f"donate_buffer(tensors). {see('auto')}"
            )
        super().__init__()
        self._enabled = enabled
        self._depths: list[int] = []  # for each time that it has been entered
        with _lock:
            _open[:] = [call for call in _open if call() is not None]
            self._before = _C.auto_donate_is_default()
            _open.append(weakref.ref(self))
            _C.set_auto_donate(enabled)

    def enter(self) -> None:
        self._take_back()
        self._depths.append(_C.auto_donate_depth())
        _C.push_auto_donate(self._enabled)

    def leave(self, raised: bool) -> None:
        self._take_back()  # where an interrupt has kept enter() from it
        if self._depths:
            _C.pop_auto_donate(self._depths[-1])
            self._depths.pop()

    def _take_back(self) -> None:
        """It has been a call for all threads until now. What stood before it stands again.

        Unless another call has come since; if that is a context to be, too, it must not bring this one back.
        """
        with _lock:
            calls = [call() for call in _open]
            if self in calls:
                place = calls.index(self)
                later = next((call for call in calls[place + 1 :] if call is not None), None)
                if later is not None:
                    later._before = self._before
                elif place == len(calls) - 1:
                    _C.set_auto_donate(self._before)
                del _open[place]


_lock = threading.Lock()
_open: list[weakref.ref[auto_donate]] = []  # calls that have not been entered as contexts, oldest first


def prepare() -> str:
    """Why nothing can be donated automatically in this process; empty if it can.

    The hooks ask this once, before the first step: by then the runtime has been set up. What is raised here, as by a
    signal's handler, reaches the program at that step, and the next one asks again.
    """
    try:
        _host.verify_layouts()
    except ImportError as error:
        _C.note_auto_refusal(str(error))  # the hooks, which would do it at each step, have been taken out
        return str(error)
    _C.set_one_of_many(_host.process_count() > 1)
    if _config.functionalization_off():
        return "functionalization is off (XLA_DISABLE_FUNCTIONALIZATION=1), so views share graphs with live tensors"
    _host.ignores_donors()  # tells the hooks, as a donation does later, so that it is no reason for good
    return ""


def start() -> None:
    """Switches it on for the process if the environment says so. ValueError if it says neither yes nor no."""
    if _config.auto_donate():
        auto_donate(True)
