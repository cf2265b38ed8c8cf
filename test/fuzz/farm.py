"""Runs programs of `fuzz.states` in forked processes, confirms what goes wrong in fresh ones, and shrinks it.

The process that imports this starts no runtime of torch_xla. Its children do: a fork takes a third of a second, a fresh
interpreter seven.
"""

from __future__ import annotations

import collections
import gc
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import tempfile
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import torch
import torch._dynamo  # so that the children need not import it
import torch_xla
import torch_xla.core.xla_model as xm

import torch_xla_donate
from fuzz.states import (
    PRELUDE,
    SHARD,
    TURNS,
    UP_TO_DATE,
    Expected,
    Program,
    generate,
    render,
    smaller,
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

    @property
    def kind(self) -> str:
        """The first problem without its numbers and names."""
        return normal(self.wrong[0]) if self.wrong else ""


def normal(text: str) -> str:
    """A message without what differs from program to program."""
    text = text.splitlines()[0] if text else ""
    text = re.sub(r" is \(.*", " has a wrong value", text)
    text = re.sub(r" at `.*= f\(.*?`", " at a call", text)
    text = re.sub(r" at `(\w+).*?`", lambda found: f" at {'a line' if '=' in found[0] else found[1]}", text)
    text = re.sub(r"""('[^']*'|"[^"]*"|\(argument [^)]*\))""", "", text)
    text = re.sub(r"\b[shexkv]\d+(_\d+)?\b", "_", text)
    text = re.sub(r"(\b_|f32|s32|s64|bf16|float32|int32|int64|bfloat16)*\[[\d, ]*\]", "[]", text)
    return re.sub(r"0x[0-9a-f]+|\d+", "N", text)[:110]


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
    return written is not None and bool(frame.f_locals[written[1]]._is_view())


def _mildness(problem: str) -> tuple[bool, bool, str]:
    """Wrong values before lost ones, and what `is_donated` says last."""
    return "is_donated" in problem, "wrong value" not in normal(problem), problem


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


class Child:
    """A forked process that runs `work`, which sends what it finds."""

    def __init__(self, work: Callable[[Callable[[Any], None]], None], sharded: bool) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._errors.close)
        self.found, sends = FORK.Pipe(duplex=False)
        self.process = FORK.Process(target=_start, args=(work, sends, self._errors.fileno(), sharded), daemon=True)
        self.process.start()
        sends.close()

    def receive(self) -> Any:
        """What it sends next. Raises EOFError at its end."""
        try:
            return self.found.recv()
        except EOFError:
            self.process.join()
            raise

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> str:
        """The exit code, and the first line on stderr that gives the cause of a crash."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        telling = [line for line in lines if "Check failed" in line or "terminate" in line or "Error" in line]
        return f"the process ended with {self.process.exitcode}: {(telling or lines or [''])[-1][-300:]}"


def _start(work: Callable[[Callable[[Any], None]], None], sends: Any, errors: int, sharded: bool) -> None:
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sharded:
        import torch_xla.runtime as xr

        xr.use_spmd()
    torch_xla.device()
    work(sends.send)


def all_of(child: Child) -> list[Any]:
    """Everything that a child sends."""
    found = []
    while child.found.poll(PATIENCE):
        try:
            found.append(child.receive())
        except EOFError:
            return found
    child.kill()
    return found


def in_fresh_process(programs: Sequence[tuple[Program, str]], sharded: bool) -> Outcome:
    """The outcome of the last of the programs, in a process that runs only these."""

    def work(send: Callable[[Any], None]) -> None:
        for i, (program, mode) in enumerate(programs):
            outcome = run(program, mode, sharded)
            if i == len(programs) - 1:
                send(outcome)

    child = Child(work, sharded)
    found = all_of(child)
    return found[0] if found else Outcome([child.end()])  # type: ignore[no-any-return]


def first_wrong(programs: Sequence[tuple[Program, str]], sharded: bool) -> int | None:
    """The number of the first program with a problem, all run in one process; where it ends, that of the next."""

    def work(send: Callable[[Any], None]) -> None:
        for i, (program, mode) in enumerate(programs):
            send(i)
            if run(program, mode, sharded).wrong:
                send(-1)
                return

    child = Child(work, sharded)
    found = all_of(child)
    if found and (found[-1] == -1 or child.process.exitcode != 0):
        return next(i for i in reversed(found) if i >= 0)  # type: ignore[no-any-return]
    return None


# --- what went wrong ---


class Failure(NamedTuple):
    """A program that this package makes wrong, and torch_xla without it does not."""

    number: int
    program: Program
    mode: str
    outcome: Outcome
    earlier: tuple[tuple[Program, str], ...] = ()  # programs that must run before it, in the same process

    def text(self, seed: int, sharded: bool) -> str:
        """A failure, and a program that shows it."""
        lines = [f"program {self.number} of seed {seed}, {self.mode}{', four devices' * sharded}:", *self.outcome.wrong]
        if self.earlier:
            lines.append(f"only after these programs, in one process: {list(self.earlier)!r}")
        lines += [f"shrunk to {self.program!r}", "", render(self.program, self.mode, sharded).alone(sharded)]
        return "\n".join(lines)


def shrink(failure: Failure, sharded: bool, attempts: int = 60) -> Failure:
    """The simplest program found that fails alike, each in a fresh process."""
    program, outcome = failure.program, failure.outcome
    if failure.earlier:
        return failure
    while attempts > 0:
        candidates: list[tuple[Program, str]] = []
        seen = {render(program, failure.mode, sharded).source}
        size = len(render(program, failure.mode, sharded).source)
        for other in smaller(program):
            source = render(other, failure.mode, sharded).source
            if source not in seen and len(source) <= size:
                seen.add(source)
                candidates.append((other, failure.mode))
        while candidates and attempts > 0:
            attempts -= 1
            at = first_wrong(candidates, sharded)
            if at is None:
                return failure._replace(program=program, outcome=outcome)
            chosen, candidates = candidates[at], candidates[at + 1 :]
            alone = in_fresh_process([chosen], sharded)
            alike = alone.wrong and alone.kind[:24] == outcome.kind[:24]
            if alike and not in_fresh_process([(chosen[0], stock_of(chosen[1]))], sharded).wrong:
                program, outcome = chosen[0], alone
                break
        else:
            break
    return failure._replace(program=program, outcome=outcome)


class Campaign:
    """Many programs, on several processes."""

    def __init__(self, seed: int, sharded: bool, modes: Sequence[str] | None = None) -> None:
        self.seed, self.sharded = seed, sharded
        self.modes = tuple(modes or TURNS)
        self.counts: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self.of_stock: collections.Counter[str] = collections.Counter()
        self.of_history: list[Failure] = []
        self.failures: list[Failure] = []

    def program(self, number: int) -> tuple[Program, str]:
        return generate(self.seed, number), self.modes[number % len(self.modes)]

    def _work(self, start: int, stop: int) -> Callable[[Callable[[Any], None]], None]:
        def work(send: Callable[[Any], None]) -> None:
            gc.freeze()  # so that a collection is quick
            gc.disable()  # cycles are collected between programs, not at random within one
            for number in range(start, stop):
                send(number)
                program, mode = self.program(number)
                send(run(program, mode, self.sharded))
                if number % 10 == 0:
                    gc.collect()

        return work

    def run(self, start: int, stop: int, jobs: int, on_failure: Callable[[Failure], None]) -> Iterator[int]:
        """Runs the programs from start to stop, or to the first failure; yields how many are done."""
        ranges = collections.deque((i, min(i + CHUNK, stop)) for i in range(start, stop, CHUNK))
        running: dict[Any, tuple[Child, list[int]]] = {}  # the start, the program that runs, and the end, by pipe

        def launch() -> None:
            while ranges and len(running) < jobs:
                first, last = ranges.popleft()
                child = Child(self._work(first, last), self.sharded)
                running[child.found] = child, [first, first, last]

        launch()
        try:
            while running:
                ready = multiprocessing.connection.wait(list(running), PATIENCE)
                if not ready:
                    raise RuntimeError(f"no sign of life of the programs {[at[1] for _, at in running.values()]}")
                for pipe in ready:
                    child, place = running[pipe]
                    outcome = None
                    try:
                        got = child.receive()
                    except EOFError:
                        if child.process.exitcode != 0:
                            outcome = Outcome([child.end()])
                    else:
                        if isinstance(got, int):
                            place[1] = got
                            continue
                        self._count(place[1], got)
                        yield self.counts["programs"]
                        if not got.wrong:
                            continue
                        outcome = got
                    # A failure may have left tensors without buffers, so the others get a new process.
                    del running[pipe]
                    child.kill()
                    if outcome is not None:
                        if not self._suspect(place, outcome, on_failure):
                            return
                        if place[1] + 1 < place[2]:
                            ranges.appendleft((place[1] + 1, place[2]))
                    launch()
        finally:
            for child, _ in running.values():
                child.kill()

    def _count(self, number: int, outcome: Outcome) -> None:
        self.counts["programs"] += 1
        self.counts[self.modes[number % len(self.modes)]] += 1
        self.counts["refused"] += bool(outcome.refused)
        self.counts["consumed"] += outcome.consumed
        self.counts["checks"] += outcome.checks
        self.counts["donated"] += outcome.donated
        if outcome.refused:
            self.refusals[normal(outcome.refused)] += 1

    def _suspect(self, place: list[int], outcome: Outcome, on_failure: Callable[[Failure], None]) -> bool:
        """Whether to go on after a program with a problem."""
        first, number, _ = place
        program, mode = self.program(number)
        alone = in_fresh_process([(program, mode)], self.sharded)
        if alone.wrong:
            stock = in_fresh_process([(program, stock_of(mode))], self.sharded)
            if not stock.wrong:
                stock = in_fresh_process([(program, stock_of(mode) + UP_TO_DATE)], self.sharded)
            if stock.wrong:
                self.counts["of_stock"] += 1
                self.of_stock[stock.kind] += 1
                return True
            return self._fail(Failure(number, program, mode, alone), on_failure)
        earlier = [self.program(i) for i in range(first, number)]
        again = in_fresh_process([*earlier, (program, mode)], self.sharded)
        if not again.wrong:
            self.counts["of_history"] += 1
            self.of_history.append(Failure(number, program, mode, outcome))
            return True
        stocks = [(other, stock_of(theirs)) for other, theirs in [*earlier, (program, mode)]]
        if in_fresh_process(stocks, self.sharded).wrong:
            self.counts["of_stock"] += 1
            self.of_stock[f"after other programs: {again.kind}"] += 1
            return True
        step = len(earlier) // 2
        while step:
            start = 0
            while start < len(earlier) and len(earlier) > 1:
                fewer = earlier[:start] + earlier[start + step :]
                found = in_fresh_process([*fewer, (program, mode)], self.sharded)
                if found.wrong:
                    earlier, again = fewer, found
                else:
                    start += step
            step //= 2
        return self._fail(Failure(number, program, mode, again, tuple(earlier)), on_failure)

    def _fail(self, failure: Failure, on_failure: Callable[[Failure], None]) -> bool:
        self.counts["failures"] += 1
        self.failures.append(failure)
        on_failure(failure)
        return False
