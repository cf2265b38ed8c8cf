"""auto_donate: donates inputs that nothing can read after the step, without marks."""

from __future__ import annotations

import itertools
import sys
import weakref

from torch_xla_donate import _C, _config, _host
from torch_xla_donate._errors import see
from torch_xla_donate._frames import is_for_with
from torch_xla_donate._locks import make_lock
from torch_xla_donate._modes.context import ThreadMode


class auto_donate(ThreadMode[int]):
    """Donates every input of a step that no live tensor can reach after the step.

    A call as a function switches it on for all threads. As a context manager it applies to the steps of this thread
    inside, and ``with auto_donate(False)`` excludes a part. An object that is made outside the ``with`` statement, as
    for ``ExitStack.enter_context``, is a call for all threads until it is entered. The environment variable
    ``TORCH_XLA_DONATE_AUTO=1`` has the effect of a call when the package is imported.

    At a step (``torch_xla.sync()``, ``xm.mark_step()``, the end of a ``torch_xla.compile``d function) torch_xla lists
    all live tensors of the device. A program can never again read an input that no live tensor holds, by its buffer, as
    a view or through pending work. Such an input becomes a donor if an output has its size. `auto_donate` skips buffers
    that torch_xla shares between tensors, and steps in `donation_disabled` and `debug_nans`. Marks of `donate_buffer`
    come first. `donation_report` shows automatic donors, and the reasons for skipped steps.

    The values of a program do not change, and automatic donors cause no warnings. The donors follow from the live
    tensors, so a steady loop compiles once. If the live tensors differ between steps (the garbage collector may free a
    cycle), a graph is compiled for at most six sets of donors. Later steps use the set that fits.

    Runs of compiled graphs (``torch.compile``, ``compile(pure=True)``) are not steps. The caller holds their inputs.

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
        # A `with` statement must not reach other threads, not even until it enters.
        caller = sys._getframe().f_back
        self._call: _Call | None = None
        if caller is None or not is_for_with(caller):
            with _lock:
                self._call = _Call(enabled)

    def make_entry(self) -> int:
        return _C.auto_donate_depth()

    def enter(self) -> None:
        self._take_back()
        super().enter()

    def switch_on(self, entry: int) -> None:
        _C.push_auto_donate(self._enabled)

    def switch_off(self, entry: int) -> None:
        _C.pop_auto_donate(entry)

    def leave(self, raised: bool) -> None:
        self._take_back()  # an interrupt may have kept enter() from it
        super().leave(raised)

    def _take_back(self) -> None:
        """Restores the default before this object, which was a call for all threads until now.

        A later call keeps its value, but must not restore this one when it becomes a context.
        """
        with _lock:
            if self._call is not None:
                self._call.take_back()
                self._call = None


class _Call:
    """A call for all threads, with what held before it. Needs the lock."""

    numbers = itertools.count(1)
    newest = 0  # the number of the last call that was not taken back

    def __init__(self, enabled: bool) -> None:
        self.number = next(self.numbers)
        self.before, self.default = _Call.newest, _C.auto_donate_is_default()
        _calls.add(self)
        _Call.newest = self.number
        _C.set_auto_donate(enabled)

    def take_back(self) -> None:
        """May run again after an interrupt."""
        if _Call.newest == self.number:
            _C.set_auto_donate(self.default)
            _Call.newest = self.before
        for later in list(_calls):
            if later.before == self.number:
                later.default, later.before = self.default, self.before


_lock = make_lock()  # a signal's handler may take it again
_calls: weakref.WeakSet[_Call] = weakref.WeakSet()  # that their objects may still take back


def prepare() -> _C.Reason:
    """The reason why this process cannot donate automatically; no reason if it can.

    The hooks call it before the first step, when the runtime is set up; each thread that steps meanwhile calls it, too.
    An exception here, such as one of a signal's handler, reaches the program at that step. The next step then calls it
    again.
    """
    try:
        _host.verify_layouts()
    except ImportError as error:
        why = _C.Reason("unsupported", str(error))
        _C.note_auto_refusal(why)  # the hooks would note it at each step, but are removed
        return why
    _C.set_one_of_many(_host.process_count() > 1)
    if _config.functionalization_off():
        return _C.Reason("functionalization_off")
    _host.ignores_donors()  # passes the setting to the hooks; it may change, so it is not a permanent reason
    return _C.Reason()


def start() -> None:
    """Switches it on for the process if the environment does. Raises ValueError for neither yes nor no."""
    _C.keep_order(_config.flag("TORCH_XLA_DONATE_KEEP_ORDER"))
    if _config.flag("TORCH_XLA_DONATE_AUTO"):
        auto_donate(True)
