"""torch_xla's eager mode: operations donate nothing and end the marks they read; compiled functions donate."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_xla
from helpers import each_backend, pointer
from torch_xla.experimental import eager_mode_context, is_eager_mode

import torch_xla_donate
from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    cancel_donation,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
)

REASON = "eager mode runs each operation at once, outside a step, and ran one that reads it"


@pytest.fixture(autouse=True)
def eager():
    with eager_mode_context(True):
        yield


def last():
    (donor,) = donation_report(steps=1).donors
    return donor


@pytest.mark.parametrize(
    "operation", [lambda t: t + 1, lambda t: t[1], lambda t: t.clone().mul_(3), lambda t: t.mul_(3)]
)
def test_an_operation_ends_the_mark_and_the_tensor_stays(make, operation):
    t, copy = make(4), torch.arange(4.0)
    with pytest.warns(DonationWarning, match=f"not usable: f32.4. .donated at .*test_eager_mode.py:.*\n.*{REASON}"):
        donate_buffer(t)
        out = operation(t)
        torch_xla.sync()
    assert (last().outcome, last().reason) == ("unusable", REASON)
    assert _C.sizes()["pending"] == 0
    # THEN no later step comes upon the mark
    with torch_xla.compile():
        late = t * 2
    assert not is_donated(t)
    assert torch.equal(out.cpu(), operation(copy))
    assert torch.equal(t.cpu(), copy) and torch.equal(late.cpu(), copy * 2)


def test_the_next_donation_warns_where_no_sync_follows(make):
    t = make(4)
    with pytest.warns(DonationWarning, match=REASON):
        donate_buffer(t)
        t = t + 1
        donate_buffer(t)
    cancel_donation(t)


def test_a_strict_donation_raises_at_the_sync(make):
    t = make(4)
    donate_buffer(t, strict=True)
    out = t + 1
    with pytest.raises(DonationError, match=REASON):
        torch_xla.sync()
    assert out.tolist() == [1, 2, 3, 4]


def test_donations_in_a_loop_of_operations_leave_nothing_behind(make):
    t = make(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DonationWarning)
        for _ in range(50):
            donate_buffer(t)
            t = t + 1
        donation_report()
    assert t.tolist() == [50, 51, 52, 53]
    assert _C.sizes()["pending"] == 0
    assert not _C.has_notices()


def test_reads_of_the_tensor_itself_leave_the_mark_pending(make):
    t = make(4)
    donate_buffer(t)
    for read in (print, torch.Tensor.tolist, torch.Tensor.cpu):
        read(t)
        torch_xla.sync()
        assert _C.sizes()["pending"] == 1
    with torch_xla.compile():
        out = t * 2
    assert is_donated(t)
    assert out.tolist() == [0, 2, 4, 6]


def test_syncs_and_other_operations_leave_marks_for_compile(make):
    """A compiled function then consumes them."""
    t, other = make(4), make(4)
    first = pointer(t)
    donate_buffer(t)
    other = other * 2
    torch_xla.sync()
    step = torch_xla.compile(lambda x: x + 1)
    out = step(t)
    assert is_eager_mode()
    assert pointer(out) == first
    with pytest.raises(DonatedBufferError, match="test_eager_mode.py"):
        t * 2  # an operation that would run at once
    assert (out.tolist(), other.tolist()) == ([1, 2, 3, 4], [0, 2, 4, 6])


def test_donate_buffer_inside_of_a_compiled_function_donates(make):
    @torch_xla.compile
    def step(x):
        donate_buffer(x)
        return x + 1

    t = make(4)
    first = pointer(t)
    out = step(t)
    assert is_donated(t)
    assert pointer(out) == first
    assert is_eager_mode()


@each_backend
def test_compiled_functions_of_this_package_donate_at_every_call(make, options):
    step = torch_xla_donate.compile(lambda state, x: {"w": state["w"] * 2 + x}, donate_argnums=0, **options)
    state, x = {"w": make(4)}, make(4) * 0 + 1  # an operation that has run at once
    first = pointer(state["w"])
    for _ in range(3):
        old, state = state, step(state, x)
        assert is_donated(old["w"])
        assert is_eager_mode()
    assert pointer(state["w"]) == first
    assert state["w"].tolist() == [7, 15, 23, 31]
    assert x.tolist() == [1, 1, 1, 1]


def test_disabled_donation_ends_the_mark_without_a_warning(make):
    t = make(4)
    with donation_disabled():
        donate_buffer(t)
        out = t + 1
        torch_xla.sync()
    assert last().reason == "donation is disabled (donation_disabled())"
    assert out.tolist() == [1, 2, 3, 4]
