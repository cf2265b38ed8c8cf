"""TORCH_XLA_DONATE_WARN_COPIES=1: a warning if XLA reuses a donated buffer but copies it first."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch_xla
from children import in_process
from helpers import BACKENDS

from torch_xla_donate import DonationWarning, auto_donate, compile, donate_buffer, donation_report

ON = {"TORCH_XLA_DONATE_WARN_COPIES": "1"}


def turn(t):
    """XLA computes one result in the donor's memory, and still needs the donor for the other."""
    return t.flip(0), t.sum() + t


def turned(t):
    donate_buffer(t)  # the donation
    out = turn(t)
    torch_xla.sync()
    return out


@pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)
@in_process(env=ON)
def test_a_compiled_function_warns_at_its_first_call(make, options):
    f = compile(turn, donate_argnums=0, **options)
    with pytest.warns(DonationWarning, match="copies them first"):
        t, _ = f(make(6))
    t, _ = f(t)
    assert t.tolist() == [0, 1, 2, 3, 4, 5]


@in_process(env=ON)
def test_the_warning_says_that_a_donor_is_automatic(make):
    t = make(6)
    with auto_donate(), pytest.warns(DonationWarning, match=r"\(auto\)"):
        t, _total = turn(t)
        torch_xla.sync()
    assert t.tolist() == [5, 4, 3, 2, 1, 0]


def test_without_the_variable_nothing_is_said(make):
    assert turned(make(6))[0].tolist() == [5, 4, 3, 2, 1, 0]
    assert donation_report(steps=1).copied_bytes == 24


@in_process(env=ON)
def test_the_warning_comes_once_for_each_graph_that_copies(make):
    t = make(6)
    donate_buffer(t)
    t = t + 1  # is not copied: no warning
    torch_xla.sync()
    assert donation_report().donors[0].outcome == "donated" and donation_report().copied_bytes == 0
    for size in (6, 8):
        with pytest.raises(DonationWarning) as raised:
            turned(make(size))
        assert re.fullmatch(
            r"XLA reuses the memory of these donated buffers but copies them first, at each run of step \d+:\n"
            rf"  f32\[{size}\]: {4 * size} B\.\n"
            r"  An operation reads the old value after XLA begins to write the new one\. "
            r"See `python -m torch_xla_donate explain report`\.",
            str(raised.value),
        )
        turned(make(size))


@in_process(env=ON)
def test_a_graph_that_another_thread_has_run_is_looked_at_too(make):
    """The other thread does not end its step, so it does not look for copies."""
    t = make(6)

    def run_without_end():
        donate_buffer(t)
        out = turn(t)
        torch_xla._XLAC._xla_sync_live_tensors(str(torch_xla.device()), [], True)
        return out

    with ThreadPoolExecutor(1) as other:
        assert other.submit(run_without_end).result()[0].tolist() == [5, 4, 3, 2, 1, 0]
    with pytest.warns(DonationWarning, match="copies them first"):
        turned(make(6))
