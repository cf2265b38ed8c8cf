"""Threads that mark, cancel, report and step at once: python -m sanitize.threads.

One thread steps a number of times; the others end with it. Each checks what must hold however they are scheduled.

Only the stepping thread makes and reads tensors, and the others see none that a running step computes. Stock torch_xla
fails ("handle != nullptr") when another thread reads during a step.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator

import torch
import torch_xla

from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    auto_donate,
    cancel_donation,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
)


def run(rounds: int) -> int:
    """Steps so many times, while other threads do the rest. Returns how many steps donated."""
    idle = [torch.arange(4.0).to("xla") for _ in range(8)]
    value = torch.zeros(16).to("xla")
    torch_xla.sync(wait=True)
    donate_buffer(idle)  # the first donation makes a tensor, to verify the layouts
    cancel_donation(idle)
    shared = [value]  # what the next step reads
    donated = 0
    errors: list[BaseException] = []
    sys.setswitchinterval(1e-4)
    begin, stepped = threading.Barrier(5), threading.Event()

    def step(number: int) -> None:
        nonlocal donated
        old = shared[0]
        donate_buffer(old)
        with auto_donate(number % 3 == 0), donation_disabled() if number % 5 == 0 else contextlib.nullcontext():
            new = old + 1
            torch_xla.sync()
        shared[0] = new
        if is_donated(old):
            donated += 1
            try:
                old + 1
            except DonatedBufferError:
                return
            raise AssertionError("a donated tensor could be used")
        # The mark was cancelled in time, or donation was off.
        cancel_donation(old)
        assert old[0].item() == number, (old, number)

    def cancel(_: int) -> None:
        with contextlib.suppress(DonationError):  # the step was faster
            cancel_donation(shared[0])

    def mark(number: int) -> None:
        if number % 2:
            donate_buffer(idle)
            cancel_donation(idle)
            return
        with contextlib.suppress(ZeroDivisionError), donate_buffer(idle[::2]):
            raise ZeroDivisionError

    def report(number: int) -> None:
        found = donation_report()
        assert all(donor.outcome in ("donated", "unusable") for donor in found.donors)
        str(found) if number % 10 == 0 else found.to_dict()

    def ask(_: int) -> None:
        _C.steps(), _C.pending(), _C.sizes(), _C.hook_errors(), _C.auto_held()
        for t in (*idle, *shared):
            is_donated(t)

    def loop(action: Callable[[int], None], numbers: Iterable[int]) -> None:
        begin.wait()
        try:
            for number in numbers:
                action(number)
        except BaseException as error:
            errors.append(error)

    def until_the_last_step() -> Iterator[int]:
        yield from itertools.takewhile(lambda number: number == 0 or not stepped.is_set(), itertools.count())

    actions = (cancel, mark, report, ask)
    threads = [threading.Thread(target=loop, args=(action, until_the_last_step())) for action in actions]
    for thread in threads:
        thread.start()
    loop(step, range(rounds))
    stepped.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    cancel_donation([*idle, *shared])
    assert shared[0].tolist() == [float(rounds)] * 16
    assert [t.tolist() for t in idle] == [[0.0, 1.0, 2.0, 3.0]] * 8
    assert _C.pending() == [] and _C.hook_errors() == {}
    return donated


if __name__ == "__main__":
    print(run(400), "of 400 steps have donated")
