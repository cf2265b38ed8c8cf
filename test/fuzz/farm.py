"""Runs programs of `fuzz.states` in forked processes, and confirms in fresh ones what goes wrong.

The process that imports this starts no runtime of torch_xla. Its children do.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import torch
import torch._dynamo  # so that the children need not import it
import torch_xla
import torch_xla.core.xla_model as xm

import torch_xla_donate
from fuzz.states import (
    PRELUDE,
    SHARD,
    UP_TO_DATE,
    Expected,
    Program,
    render,
    stock_of,
    value_of,
)
from torch_xla_donate import DonatedBufferError, DonationError

CHUNK = 250  # programs that one process runs: what they leave behind slows later ones down
PATIENCE = 300.0  # seconds without a sign of life
FORK = multiprocessing.get_context("fork")


class Outcome(NamedTuple):
    """The outcome of a program."""

    wrong: list[str]  # what must not be
    refused: str = ""  # why this package did not run a call
    consumed: int = 0  # checks that a consumed tensor has refused
    checks: int = 0
    donated: int = 0  # donors that the report of the program's last 8 steps calls donated


def _look(tensor: torch.Tensor) -> tuple[str, Any]:
    """A tensor's value, or "consumed" with what `is_donated` says, or "error" with a text."""
    donated: bool | None = None
    text = ""
    try:
        donated = torch_xla_donate.is_donated(tensor)
    except Exception as error:
        text = f"is_donated raises {type(error).__name__}: {error}"
    try:
        found = value_of(tensor)
    except DonatedBufferError:
        return "consumed", text or donated
    except Exception as error:
        return "error", f"raises {type(error).__name__}: {error}"
    if text:
        return "error", text
    if donated:  # until the end of a graph's first run, which shows whether XLA uses the buffer
        xm.wait_device_ops()
        if torch_xla_donate.is_donated(tensor):
            return "error", "is_donated is True, and it can be read"
    return found


def _judge(expected: Expected, found: tuple[str, Any]) -> list[str]:
    name, value, may_raise = expected
    if found[0] == "consumed":
        if not may_raise:
            return [f"{name} is lost: it raises DonatedBufferError"]
        if isinstance(found[1], str):
            return [f"{name} {found[1]}"]
        return [] if found[1] else [f"{name} raises DonatedBufferError while is_donated is False"]
    if found[0] == "error":
        return [f"{name} {found[1]}"]
    return [] if found == value else [f"{name} is {found}, not {value}"]


def _is_of_a_write_to_a_view(error: BaseException, source: str) -> bool:
    """Whether the program's innermost line, which may be in its function, writes to a view in place."""
    *_, (frame, line) = (at for at in traceback.walk_tb(error.__traceback__) if at[0].f_code.co_filename == "<program>")
    written = re.match(r"\s*(\w+)(\[.*\] = |\.\w+_\()", source.splitlines()[line - 1])
    if written is None:
        return False
    x = frame.f_locals[written[1]]
    return bool(x._is_view()) or x.untyped_storage().nbytes() > x.nbytes  # of a detached view


def _mildness(problem: str) -> tuple[bool, bool, str]:
    """Wrong values before lost ones, and what `is_donated` says last."""
    return "is_donated" in problem, " is (" not in problem, problem


def _donors() -> Sequence[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch_xla_donate.donation_report().donors


def run(program: Program, mode: str, sharded: bool) -> Outcome:
    """Runs a program in this process."""
    rendered = render(program, mode, sharded)
    found: list[tuple[int, tuple[str, Any]]] = []
    scope: dict[str, Any] = {"check": lambda number, tensor: found.append((number, _look(tensor)))}
    wrong: list[str] = []
    refused = ""
    exec(PRELUDE + SHARD * sharded, scope)
    before = max((donor.step for donor in _donors()), default=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(compile(rendered.source, "<program>", "exec"), scope)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<program>"]
        line = lines[0] if lines else 0
        call = rendered.calls.get(line or 0)
        text = rendered.source.splitlines()[(line or 1) - 1]
        ours = isinstance(error, DonationError | ValueError) and not isinstance(error, DonatedBufferError)
        if ours and call is not None:
            refused = f"{type(error).__name__}: {error}"
            # The caller has what it had before the call.
            last = {expected.name: expected for expected in render(program, mode, sharded, stop=call).expected}
            for expected in last.values():
                if expected.name in scope:
                    wrong += [f"{text}, after a refusal" for text in _judge(expected, _look(scope[expected.name]))]
        elif isinstance(error, DonatedBufferError) and _is_of_a_write_to_a_view(error, rendered.source):
            refused = "a write through a view of what was donated"
        else:
            wrong.append(f"{type(error).__name__} at `{text}`: {error}")
        error.__traceback__ = None
    finally:
        torch_xla_donate.set_auto_donate(False)
    consumed = sum(look[0] == "consumed" for _, look in found)
    for number, look in found:
        wrong = wrong + _judge(rendered.expected[number], look)
    donated = 0 if "stock" in mode else sum(donor.outcome == "donated" for donor in _donors() if donor.step > before)
    scope.clear()
    if "openxla" in mode:
        torch._dynamo.reset()
    return Outcome(sorted(wrong, key=_mildness), refused, consumed, len(found), donated)


# --- processes ---


class Worker:
    """A forked process that runs programs one after another, and is replaced after 250.

    A fork takes a third of a second, a fresh interpreter seven.
    """

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        self._pool: ProcessPoolExecutor | None = None
        self.ran: list[tuple[Program, str]] = []  # in the process

    def run(self, program: Program, mode: str) -> Outcome:
        """The outcome of a program; also if the process ends."""
        if self._pool is None or len(self.ran) == CHUNK:
            self.renew()
            self._pool = ProcessPoolExecutor(1, FORK, _start, (self.sharded,))
        self.ran.append((program, mode))
        try:
            return self._pool.submit(_run_next, program, mode, self.sharded, len(self.ran)).result()
        except BrokenProcessPool:
            return Outcome(["the process ended; its output is above"])

    def run_fresh(self, programs: Sequence[tuple[Program, str]]) -> Outcome:
        """The outcome of the last of the programs, in a process that runs only these."""
        self.renew()
        outcome = [self.run(program, mode) for program, mode in programs][-1]
        self.renew()
        return outcome

    def renew(self) -> None:
        """Ends the process. A program with a problem may have left tensors without buffers."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool, self.ran = None, []

    def judge(self, program: Program, mode: str) -> tuple[Outcome, str]:
        """The outcome; and whose fault its problem is: "ours", "of_stock", or "of_history", if it does not come again.

        A problem is ours if torch_xla without this package has none.
        """
        outcome = self.run(program, mode)
        if not outcome.wrong:
            return outcome, ""
        history = self.ran
        for programs in ([(program, mode)], history):
            again = self.run_fresh(programs)
            if not again.wrong:
                continue
            stock = [self.run_fresh([(one, stock_of(way) + end) for one, way in programs]) for end in ("", UP_TO_DATE)]
            if any(one.wrong for one in stock):
                return outcome, "of_stock"
            if programs is history:
                print(f"only after the programs before it, in one process: {history!r}", file=sys.stderr)
            return again, "ours"
        return outcome, "of_history"


def _start(sharded: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sharded:
        import torch_xla.runtime as xr

        xr.use_spmd()
    torch_xla.device()
    gc.freeze()  # so that a collection is quick
    gc.disable()  # cycles are collected between programs, not at random within one


def _run_next(program: Program, mode: str, sharded: bool, number: int) -> Outcome:
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        return run(program, mode, sharded)
    finally:
        faulthandler.cancel_dump_traceback_later()
        if number % 10 == 0:
            gc.collect()
