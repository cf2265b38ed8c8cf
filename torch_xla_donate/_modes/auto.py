"""auto_donate: donates inputs that nothing can read after the step, without marks."""

from __future__ import annotations

import warnings

from torch_xla_donate import _C, _config, _host
from torch_xla_donate._errors import DonationWarning, see
from torch_xla_donate._modes.context import F, SwitchMode


def set_auto_donate(enabled: bool) -> None:
    """Switches `auto_donate` on or off for the steps of all threads. Their ``with auto_donate()`` blocks come first.

    ``TORCH_XLA_DONATE_AUTO=1`` does it when the package is imported.

    Args:
        enabled: whether to donate.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """
    _check(enabled)
    _C.set_auto_donate(enabled)


def _check(enabled: object) -> None:
    if not isinstance(enabled, bool):
        raise TypeError(
            f"enabled is of type {type(enabled).__name__}, not a bool. Pass True or False, or mark tensors with "
            f"donate_buffer(tensors). {see('modes')}"
        )


class auto_donate(SwitchMode):
    """Donates every input of a step that no live tensor can reach after the step.

    A context manager and decorator: it applies to the steps of this thread inside, and ``with auto_donate(False)``
    excludes a part. `set_auto_donate` switches it on for all threads.

    At a step (``torch_xla.sync()``, ``xm.mark_step()``, the end of a ``torch_xla.compile``d function) torch_xla lists
    all live tensors of the device. A program can never again read an input that no live tensor holds, by its buffer, as
    a view or through pending work. Such an input becomes a donor if an output has its size. `auto_donate` skips buffers
    that torch_xla shares between tensors, and steps in `donation_disabled` and `debug_nans`. Marks of `donate_buffer`
    come first. `donation_report` shows automatic donors, and the reasons for skipped steps.

    The values of a program stay equal up to rounding (bit for bit with ``TORCH_XLA_DONATE_KEEP_ORDER=1``), and
    automatic donors cause no warnings. The donors follow from the live tensors, so a steady loop compiles once. If the
    live tensors differ between steps (the garbage collector may free a cycle), a graph is compiled for at most six sets
    of donors. Later steps use the set that fits.

    Runs of compiled graphs (``torch.compile``, ``compile(pure=True)``) are not steps. The caller holds their inputs.

    Args:
        enabled: whether to donate.

    Raises:
        TypeError: ``enabled`` is not a bool.
    """

    def __init__(self, enabled: bool = True) -> None:
        _check(enabled)
        super().__init__(automatic=enabled)
        self._use: _Unused | _Used = _Unused()

    def __call__(self, func: F) -> F:
        self._use.__class__ = _Used
        return super().__call__(func)

    def enter(self) -> None:
        self._use.__class__ = _Used
        super().enter()


class _Unused:
    """Warns when it goes with its mode. As `_Used` it runs no Python code then: an interrupt in it would be lost."""

    def __del__(self) -> None:
        warnings.warn(
            "auto_donate() has no effect without `with`, and is not a switch. Call set_auto_donate(True) to donate "
            f"in all threads from now on. {see('modes')}",
            DonationWarning,
            stacklevel=2,
        )


class _Used:
    pass


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
    if _config.is_yes(_C.environment("XLA_DISABLE_FUNCTIONALIZATION") or "0"):  # views share the graphs of their bases
        return _C.Reason("functionalization_off")
    _host.ignores_donors()  # passes the setting to the hooks; it may change, so it is not a permanent reason
    return _C.Reason()


def start() -> None:
    """Passes `TORCH_XLA_DONATE_KEEP_ORDER` to the hooks, and does what `TORCH_XLA_DONATE_AUTO` says.

    Raises ValueError for a value of either that is neither yes nor no.
    """
    _C.keep_order(_config.flag("TORCH_XLA_DONATE_KEEP_ORDER"))
    if _config.flag("TORCH_XLA_DONATE_AUTO"):
        set_auto_donate(True)
