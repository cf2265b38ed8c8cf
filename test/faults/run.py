"""Fails each allocation of our C++ code in turn, and throws, interrupts and calls the program in each hook.

    make faults

`make faults` builds the module with faults.cpp in build-faults/ and runs this program. Each scenario has a separate
process. In an attempt the n-th allocation of one step fails, for n = 0, 1, 2, ... until a step needs fewer; then each
phase of the step throws, and then gets a signal. After each attempt a fresh step must donate and compute right values,
nothing may wait, no mark may be left, and the exception or the report must say what happened. The exit code is 1 if an
attempt fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib.abc
import importlib.util
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

os.environ.setdefault("PJRT_DEVICE", "CPU")
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import BACKENDS, ROOT, error_of, make, run_in_a_fork

MODULE = "torch_xla_donate._C"
PHASES = (
    "ListBegins",
    "TensorMade",
    "BeforeGraph",
    "GraphKnown",
    "ProposeDonors",
    "AtBarrier",
    "CheckRun",
    "BeforeRun",
    "AtStart",
    "OnEnd",
    "AfterStep",
)
THROW, INTERRUPT, CALL = 1, 2, 3
# A guard and not an assertion: an attempt takes milliseconds.
TIMEOUT = 120
Errors = (RuntimeError, MemoryError, KeyboardInterrupt, ValueError)


class FaultyModule(importlib.abc.MetaPathFinder):
    """Finds the module of `make faults` in place of the package's."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(MODULE, self._file) if name == MODULE else None


class Attempt(NamedTuple):
    """One step of a scenario.

    run: what happens while faults are injected.
    check: compares the values, if nothing was raised.
    """

    run: Callable[[], Any]
    check: Callable[[], None]


def same(t: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(t.cpu(), expected), f"{t.cpu()} is not {expected}"


def counted(*sizes: int) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel(), dtype=torch.float32).reshape(sizes)


# --- The scenarios. Each call makes the tensors of a new attempt. ---


def marks() -> Attempt:
    a, b = make(8), make(4, 4)
    txd.donate_buffer([a, b])
    out = [a + 1, b * 2]
    return Attempt(sync, lambda: (same(out[0], counted(8) + 1), same(out[1], counted(4, 4) * 2)))


def unusable() -> Attempt:
    a, b = make(8), make(3)
    txd.donate_buffer({"a": a, "b": b})
    out = [a + 1, b.sum()]
    return Attempt(sync, lambda: (same(out[0], counted(8) + 1), same(out[1], counted(3).sum())))


def moved() -> Attempt:
    """Pairs that cross, so that parameters and outputs move."""
    state = [make(8) for _ in range(6)]
    plain = [state[i] * (i + 2) for i in (3, 1)]
    new = [state[i] + i for i in (5, 4, 2, 0)]
    txd.donate_buffer([state[5]], into=[new[3]])
    txd.donate_buffer([state[i] for i in (4, 2, 0)])

    def check() -> None:
        for i, value in zip((3, 1), plain):
            same(value, counted(8) * (i + 2))
        for i, value in zip((5, 4, 2, 0), new):
            same(value, counted(8) + i)

    return Attempt(sync, check)


def automatic() -> Attempt:
    p, g = make(8), make(8)
    cache = make(4, 4)
    base = cache + 0
    torch_xla.sync()
    base[0] = 7.0
    new = p - 0.5 * g
    del p

    def run() -> None:
        with txd.auto_donate():
            sync()

    expected = counted(4, 4)
    expected[0] = 7.0
    return Attempt(run, lambda: (same(new, counted(8) * 0.5), same(base, expected)))


def disabled() -> Attempt:
    a = make(8)
    txd.donate_buffer(a)
    out = a + 1

    def run() -> None:
        with txd.debug_nans():
            sync()

    return Attempt(run, lambda: same(out, counted(8) + 1))


def compiled(backend: str) -> Attempt:
    a = make(8)
    found: list[torch.Tensor] = []
    return Attempt(lambda: found.append(COMPILED[backend](a, 2.0)), lambda: same(found[0], counted(8) * 2))


def traced() -> Attempt:
    """The first call of a pure function."""
    a = make(8)
    found: list[torch.Tensor] = []
    doubled = txd.compile(lambda a: a * 2, donate_argnums=0, pure=True)
    return Attempt(lambda: found.append(doubled(a)), lambda: same(found[0], counted(8) * 2))


def marking() -> Attempt:
    """The call of donate_buffer itself: all tensors are marked, or none."""
    tensors = [make(8), make(4)]

    def run() -> None:
        try:
            txd.donate_buffer(tensors)
        except BaseException:
            count = _C.sizes()["pending"]
            assert count == 0, f"{count} marks are left by a call that raised"
            raise
        assert _C.sizes()["pending"] == 2
        txd.cancel_donation(tensors)

    return Attempt(run, lambda: same(tensors[0], counted(8)))


def marking_again() -> Attempt:
    """A call for tensors that are marked already replaces both marks, or none."""
    tensors = [make(8), make(4)]
    new = [t + 1 for t in tensors]
    txd.donate_buffer(tensors)

    def run() -> None:
        try:
            txd.donate_buffer(tensors, into=new)
        finally:
            marks = [donor["marks"] for donor in _C.pending()]
            txd.cancel_donation(tensors)
            assert marks == [1, 1], f"{marks} marks of each tensor are left"

    return Attempt(run, lambda: same(new[0], counted(8) + 1))


def reporting() -> Attempt:
    a, b = make(8), make(3)
    txd.donate_buffer([a, b])
    out = a + b.sum()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sync()
    return Attempt(lambda: str(txd.donation_report()), lambda: same(out, counted(8) + 3))


def logged() -> Attempt:
    """With the log of runs that `verify` keeps."""
    _C.log_runs(_C.take_runs)
    return marks()


SCENARIOS: dict[str, Callable[[], Attempt]] = {
    **{
        f.__name__: f
        for f in (marks, unusable, moved, automatic, disabled, traced, marking, marking_again, reporting, logged)
    },
    **{backend: functools.partial(compiled, backend) for backend in BACKENDS},
}


def sync() -> None:
    torch_xla.sync(wait=True)


# --- The attempts ---


class Faults:
    """The functions of faults.cpp."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        self._fail = library.torch_xla_donate_fail_allocation
        self._fail.argtypes, self._fail.restype = [ctypes.c_long], ctypes.c_long
        self._fault = library.torch_xla_donate_fault_at
        # pybind11 registers a new object outside its handlers, so an exception there would pass through Python's
        # frames. Its allocations for a call of a binding, such as the exit of a context, come before our code.
        symbols = subprocess.run(["nm", "-CS", str(file)], capture_output=True, text=True, check=True).stdout
        names = r"class_<.*>::init_instance|cpp_function::dispatcher|detail::register_instance"
        pattern = rf"^(\w+) (\w+) \w .*pybind11::(?:{names})"
        found = re.findall(pattern, symbols, re.MULTILINE)
        assert len(found) > 2, "pybind11 has no functions of these names"
        for begin, size in found:
            library.torch_xla_donate_spare(
                ctypes.c_size_t(int(begin, 16)), ctypes.c_size_t(int(begin, 16) + int(size, 16))
            )
        self.call_type = ctypes.CFUNCTYPE(None)
        self._fault.argtypes = [ctypes.c_char_p, ctypes.c_int, self.call_type]
        self._fault.restype = ctypes.c_bool

    def allocation(self, count: int) -> int:
        return int(self._fail(count))

    def at(self, phase: str, action: int, call: Callable[[], None] | None = None) -> bool:
        self._call = self.call_type(call) if call is not None else self.call_type()
        return bool(self._fault(phase.encode(), action, self._call))


def said() -> tuple[int, int, int]:
    """Grows when the report says that something has happened."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = txd.donation_report()
    unusable_donors = sum(donor.outcome == "unusable" for donor in report.donors)
    return sum(_C.hook_errors().values()), sum(report.auto_refusals.values()), unusable_donors


def assert_fresh_steps_are_right() -> None:
    with contextlib.suppress(*Errors):
        sync()  # torch_xla reports the failure of an earlier run once more
    gc.collect()
    t = make(8)
    txd.donate_buffer(t)
    out = t + 1
    sync()
    same(out, counted(8) + 1)
    assert txd.is_donated(t), f"a fresh step donates nothing: {txd.donation_report(steps=1)}"
    _C.wait_for_steps()
    sizes = _C.sizes()
    assert sizes["pending"] == 0, f"{sizes['pending']} marks are left"
    assert not _C.disabled() and not _C.auto_donates() and not _C.refuses_runs(), "a switch is left on"


def attempt(scenario: Callable[[], Attempt], begin: Callable[[], object], end: Callable[[], bool]) -> bool:
    """Runs one attempt. Returns whether the fault has happened."""
    signal.alarm(TIMEOUT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = scenario()
        before = said()
        raised: BaseException | None = None
        begin()
        try:
            one.run()
            xm.wait_device_ops()  # a signal at the end of a run interrupts here
        except Errors as error:
            raised = error
        finally:
            happened = end()
        _C.wait_for_steps()
        if raised is None:
            one.check()
            # The report's own text is lost with its exception, so a fault in it is always raised.
            assert not happened or said() != before, "nothing says that something has failed"
        del one, raised
        assert_fresh_steps_are_right()
    return happened


def fail_allocations(scenario: Callable[[], Attempt], faults: Faults) -> int:
    count = 0
    try:
        while attempt(scenario, functools.partial(faults.allocation, count), lambda: faults.allocation(-1) < 0):
            count += 1
    except BaseException:
        print(f"after {count} allocations", file=sys.stderr)
        raise
    return count


def attempt_at(scenario: Callable[[], Attempt], faults: Faults, phase: str, action: int) -> bool:
    try:
        # A signal is raised in Python's next bytecode, and needs no report.
        return attempt(
            scenario,
            lambda: faults.at(phase, action),
            lambda: not faults.at("", 0) and action == THROW,
        )
    except BaseException as error:
        raise AssertionError(f"{'a throw' if action == THROW else 'a signal'} in {phase}: {error!r}") from error


def cancel(t: torch.Tensor, outcome: list[str]) -> None:
    """Notes the error of the cancellation, or an empty text."""
    outcome.append(error_of(txd.DonationError, txd.cancel_donation, t))


def cancel_in_step(faults: Faults) -> None:
    """A cancellation between the proposal of a donor and its claim works; one that comes later raises."""
    for phase, is_late in (("ProposeDonors", False), ("CheckRun", True), ("BeforeRun", True)):
        t = make(8)
        txd.donate_buffer(t)
        out = t + 1
        outcome: list[str] = []
        faults.at(phase, CALL, functools.partial(cancel, t, outcome))
        sync()
        assert not faults.at("", 0), f"the step has not reached {phase}"
        (error,) = outcome
        assert bool(error) == is_late, (phase, error)
        assert txd.is_donated(t) == is_late, phase
        same(out, counted(8) + 1)
        if not is_late:
            same(t, counted(8))


def cancel_in_call(faults: Faults) -> None:
    """The marks of a call of a compiled function cannot be cancelled once its run begins."""
    pure = COMPILED["pure"]
    pure(make(8), 2.0)
    t = make(8)
    outcome: list[str] = []
    faults.at("CheckRun", CALL, functools.partial(cancel, t, outcome))
    out = pure(t, 3.0)
    assert len(outcome) == 1 and "No mark was cancelled" in outcome[0], outcome
    same(out, counted(8) * 3)
    assert txd.is_donated(t)


def run_scenario(name: str, file: Path) -> None:
    """The body of a child process."""
    global txd, _C, COMPILED
    faulthandler.enable()
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
    sys.meta_path.insert(0, FaultyModule(file))
    import torch_xla_donate as txd
    from torch_xla_donate import _C

    assert _C.__file__ == str(file)
    COMPILED = {
        backend: txd.compile(lambda a, factor: a * factor, donate_argnums=0, **options)
        for backend, options in BACKENDS.items()
    }
    faults = Faults(file)
    with txd.auto_donate():  # checks the host, once
        sync()
    if name == "cancel":
        cancel_in_step(faults)
        cancel_in_call(faults)
        print(f"{name:<10} ok", flush=True)
        return
    scenario = SCENARIOS[name]
    attempt(scenario, lambda: None, lambda: False)  # compiles
    phases = sum(attempt_at(scenario, faults, phase, action) for phase in PHASES for action in (THROW, INTERRUPT))
    allocations = fail_allocations(scenario, faults)
    assert allocations > 0, "no allocation has failed"
    print(f"{name:<10} ok: {allocations} allocations failed, {phases} phases threw", flush=True)


def main() -> int:
    (file,) = (ROOT / "build-faults" / "module").glob("_C*.so")
    names = sys.argv[1:] or ["cancel", *SCENARIOS]
    # cheap, as torch_xla is imported; its runtime has not started
    failed = [name for name in names if run_in_a_fork(run_scenario, name, file) != 0]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
