"""Marks that an error must not leave behind, and refusals with the right remedy."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch_xla
from helpers import no_collections, pointer

from torch_xla_donate import (
    DonationError,
    DonationWarning,
    compile,
    debug_nans,
    donate_buffer,
    donation_report,
    is_donated,
)
from torch_xla_donate._text import percent


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_takes_the_marks_back(make, error):
    w, m = make(3), make(5)
    with pytest.raises(error), donate_buffer({"w": w, "m": m}):  # noqa: PT012
        new = w - 0.5 * w, m + 1
        raise error
    torch_xla.sync()  # as a handler that saves a checkpoint
    assert not is_donated(w) and not is_donated(m)
    assert w.tolist() == [0, 1, 2]
    assert new[0].tolist() == [0, 0.5, 1]


@pytest.mark.filterwarnings("error::torch_xla_donate.DonationWarning")
@pytest.mark.parametrize("error", [DonationError, DonationWarning, FloatingPointError])
def test_an_error_of_a_step_keeps_no_tensor_alive(make, error):
    """Without a collection, since automatic donation must not depend on one."""
    tensors = []

    def fail():
        x = make(8)
        tensors.append(weakref.ref(x))
        if error is FloatingPointError:
            with debug_nans():
                y = (x - 1).log()
                torch_xla.sync()
        else:
            donate_buffer(x, strict=error is DonationError)
            y = x[:1] + 1
            torch_xla.sync(wait=True)
        del y

    gc.collect()
    with no_collections():
        failed = False
        try:
            fail()
        except error:
            failed = True
        assert failed
        assert tensors[0]() is None


def test_an_error_in_the_search_of_a_result_takes_the_marks_back(make):
    class Odd:
        @property
        def __class__(self):
            raise ValueError("odd")

    x = make(3)
    with pytest.raises(ValueError, match="odd"):
        compile(lambda x: [x + 1, Odd()], donate_argnums=0)(x)
    torch_xla.sync()
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("inside", [True, False])
def test_a_block_without_an_error_donates(make, inside):
    w = make(3)
    with donate_buffer(w):
        new = w + 1
        if inside:
            torch_xla.sync()
    torch_xla.sync()
    assert is_donated(w)
    assert torch.equal(new.cpu(), torch.arange(3.0) + 1)


def test_an_error_after_the_step_is_too_late(make):
    w = make(3)
    with pytest.raises(ValueError, match="late"), donate_buffer(w):  # noqa: PT012
        new = w + 1
        torch_xla.sync()
        raise ValueError("late")
    assert is_donated(w)
    assert torch.equal(new.cpu(), torch.arange(3.0) + 1)


def test_an_error_takes_back_the_marks_of_its_block_only(make):
    """Also those of `into` and of modules. A buffer that was marked before the block is safe as well."""
    module, outer, inner, twice = torch.nn.Linear(3, 3).to("xla"), make(3), make(5), make(6)
    new = inner * 2
    donate_buffer([outer, twice])
    with pytest.raises(ValueError, match="no"), donate_buffer(inner, into=new), donate_buffer([module, twice]):
        raise ValueError("no")
    _results = outer + 1, twice + 1, module.weight + 1
    torch_xla.sync()
    assert [is_donated(t) for t in (outer, inner, twice, module.weight)] == [True, False, False, False]


def test_the_context_holds_no_tensor(make):
    w = make(3)
    gone = weakref.ref(w)
    marks = donate_buffer(w)
    del w
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="no"), marks:
        raise ValueError("no")


def test_after_an_update_in_place_the_remedy_is_not_a_sync(make):
    """Unless the tensor never had memory."""
    w, pending = make(3), make(3) + 1
    w.mul_(2).add_(1)
    pending.mul_(2)
    with pytest.raises(DonationError, match=r"updated in place since the last step.*automatically. Remove") as error:
        donate_buffer(w)
    assert "torch_xla.sync()" not in str(error.value)
    with pytest.raises(DonationError, match=r"has no buffer yet.*Call torch_xla.sync\(\) first"):
        donate_buffer(pending)
    torch_xla.sync()


def test_a_write_through_a_view_is_marked_before_it(make):
    cache = make(3)
    cache[0] = 7
    with pytest.raises(DonationError, match="mark the tensor before you write to it through a view"):
        donate_buffer(cache)
    torch_xla.sync()
    place = pointer(cache)
    donate_buffer(cache)
    cache[1] = 8
    torch_xla.sync()
    assert cache.tolist() == [7.0, 8.0, 2.0]
    assert pointer(cache) == place
    assert donation_report(steps=1).reused_fraction == 1.0


def test_less_than_everything_is_never_100_percent(make):
    assert percent(1.0) == "100.0%"
    assert percent(0.9999999) == "99.9%"
    assert percent(0.0) == "0.0%"
    large, small = make(512, 512), make(3)
    donate_buffer([large, small])
    _result = large + small.sum()
    with pytest.warns(UserWarning, match="not usable"):
        torch_xla.sync(wait=True)
    assert "1 of 2 donors donated, 1.0 MiB (99.9% of" in str(donation_report(steps=1))
