"""A consumed tensor that is overwritten as a whole is usable again; any other operation raises and changes nothing."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_xla
from helpers import UNUSABLE_IGNORED, consume, lacking

from torch_xla_donate import _C, DonatedBufferError, auto_donate, donate_buffer, is_donated

pytestmark = UNUSABLE_IGNORED


@pytest.fixture
def consumed(make):
    def make_consumed(*shape, dtype=torch.float32, wait=True):
        t = make(*shape, dtype=dtype)
        return t, consume(t, torch.logical_not if dtype is torch.bool else lambda t: t + 1, wait=wait)

    return make_consumed


def xla(*values):
    return torch.tensor(values).to("xla")


# Their results do not depend on the old value.
FIXED = {
    "copy_": (lambda t: t.copy_(xla(5.0, 6.0, 7.0)), [5, 6, 7]),
    "copy_ from the host": (lambda t: t.copy_(torch.tensor([5.0, 6.0, 7.0])), [5, 6, 7]),
    "copy_ of one value": (lambda t: t.copy_(xla(5.0)), [5, 5, 5]),
    "copy_ of another dtype": (lambda t: t.copy_(xla(5, 6, 7)), [5, 6, 7]),
    "fill_": (lambda t: t.fill_(5), [5, 5, 5]),
    "fill_ with a tensor": (lambda t: t.fill_(xla(5.0)[0]), [5, 5, 5]),
    "zero_": (lambda t: t.zero_(), [0, 0, 0]),
    "bernoulli_": (lambda t: t.bernoulli_(1.0), [1, 1, 1]),
    "[:] =": (lambda t: t.__setitem__(slice(None), 5), [5, 5, 5]),
    "[...] =": (lambda t: t.__setitem__(..., xla(5.0, 6.0, 7.0)), [5, 6, 7]),
    ".data =": (lambda t: setattr(t, "data", xla(5.0, 6.0, 7.0)), [5, 6, 7]),
    "set_": (lambda t: t.set_(xla(5.0, 6.0, 7.0)), [5, 6, 7]),
    "_foreach_copy_": (lambda t: torch._foreach_copy_([t], [xla(5.0, 6.0, 7.0)]), [5, 6, 7]),
    "_foreach_zero_": (lambda t: torch._foreach_zero_([xla(1.0), t]), [0, 0, 0]),
    "detach().fill_": (lambda t: t.detach().fill_(5), [5, 5, 5]),
    "data.zero_": (lambda t: t.data.zero_(), [0, 0, 0]),
    "out of add": (lambda t: torch.add(xla(1.0, 2.0, 3.0), 4, out=t), [5, 6, 7]),
    "out of cat": (lambda t: torch.cat([xla(5.0), xla(6.0, 7.0)], out=t), [5, 6, 7]),
    "out of arange": (lambda t: torch.arange(3, out=t, dtype=torch.float32), [0, 1, 2]),
}


# A view of all of the tensor, and a write through a view uses the tensor.
slices = lacking(
    "2.8", "t[:] makes a view (TensorIndexing.h takes it for t only if the length equals the largest number)"
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=slices) if name == "[:] =" else name for name in FIXED])
def test_an_overwrite_gives_its_value(consumed, name):
    """Also right after the step, when nothing has waited for it; and its result is right."""
    overwrite, expected = FIXED[name]
    for wait, sync in ((False, False), (True, False), (True, True)):
        t, taken = consumed(3, wait=wait)
        with torch.no_grad():
            overwrite(t)
        assert not is_donated(t)
        if sync:
            torch_xla.sync()
        assert t.tolist() == expected
        assert (t + 1).tolist() == [value + 1 for value in expected]
        assert taken.tolist() == [1, 2, 3]
        donate_buffer(t) if sync else torch_xla.sync()
        again = t * 2
        torch_xla.sync(wait=True)
        assert is_donated(t) == sync
        assert again.tolist() == [2 * value for value in expected]


def test_any_dtype_may_be_overwritten(consumed):
    for dtype in (torch.bfloat16, torch.int32, torch.bool):
        for overwrite, value in ((torch.Tensor.zero_, 0), (lambda t: t.fill_(1), 1)):
            t, _ = consumed(4, dtype=dtype)
            overwrite(t)
            assert not is_donated(t)
            assert t.dtype == dtype
            assert t.tolist() == [value] * 4


# Random fills do not read it, and no hook takes them for overwrites.
READING = {
    "add_": lambda t: t.add_(1),
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "mul_ by 0": lambda t: t.mul_(0),
    "masked_fill_ of all": lambda t: t.masked_fill_(xla(True, True, True), 1),
    "index_fill_ of all": lambda t: t.index_fill_(0, xla(0, 1, 2), 1),
    "scatter_ of all": lambda t: t.scatter_(0, xla(0, 1, 2), 1),
    "[0] =": lambda t: t.__setitem__(0, 1),
    "copy_ of itself": lambda t: t.copy_(t),
    "view().fill_": lambda t: t.view(3).fill_(1),
    "resize_": lambda t: t.resize_(3),
    "out of add, reads it": lambda t: torch.add(t, 1, out=t),
    "fill_ with its element": lambda t: t.fill_(t[0]),
    "bernoulli_ of it": lambda t: t.bernoulli_(t),
    "out of randn, resizes it": lambda t: torch.randn(3, out=t),
    "_foreach_add_": lambda t: torch._foreach_add_([t], 1),
}


@pytest.mark.parametrize("name", READING)
def test_what_reads_the_old_value_raises_and_has_no_effect(consumed, name):
    t, taken = consumed(3)
    pending = taken * 10
    with pytest.raises(DonatedBufferError, match="test_whole_overwrites.py"):
        READING[name](t)
    assert is_donated(t)
    with pytest.raises(DonatedBufferError):
        t.tolist()
    torch_xla.sync()
    assert is_donated(t)
    assert pending.tolist() == [10, 20, 30]
    t.fill_(1)
    assert t.tolist() == [1, 1, 1]


def test_another_consumed_tensor_in_an_overwrite_is_a_use(consumed):
    t, _ = consumed(3)
    source, _ = consumed(3)
    for use in (
        lambda: t.copy_(source),
        lambda: torch.add(source, 1, out=t),
        lambda: t.bernoulli_(source),
        lambda: torch._foreach_copy_([t], [source]),
    ):
        with pytest.raises(DonatedBufferError):
            use()
        assert is_donated(t)
    fresh = xla(1.0, 2.0, 3.0)
    with pytest.raises(DonatedBufferError):
        fresh.copy_(source)
    assert fresh.tolist() == [1, 2, 3]


def test_gradients_of_an_optimizer_become_zero(make):
    """zero_grad(set_to_none=False) overwrites gradients that a step has consumed."""
    for foreach in (False, True):
        p = torch.nn.Parameter(make(3))
        optimizer = torch.optim.SGD([p], lr=1.0, foreach=foreach)
        (p * p).sum().backward()
        torch_xla.sync(wait=True)
        taken = consume(p.grad, wait=True)
        optimizer.zero_grad(set_to_none=False)
        assert p.grad.tolist() == [0, 0, 0]
        assert taken.tolist() == [1, 3, 5]


# --- is_donated of views ---

VIEWS = {
    "a row": lambda t: t[1],
    "all of it": lambda t: t[:],
    "a view of a view": lambda t: t.view(4)[1:3],
    "transposed": lambda t: t.t(),
    "of detach()": lambda t: t.detach()[0],
    "expanded": lambda t: t[0].expand(3, 2),
}
#: They share the buffer itself: to keep the value would be to copy all of it, or to donate nothing.
WHOLES = {
    "detach": torch.Tensor.detach,
    "data": lambda t: t.data,
    "Parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "real": torch.Tensor.real.__get__,
}


@pytest.mark.parametrize("name", [*VIEWS, *WHOLES])
def test_reads_raise_and_is_donated_answers_for_what_shares_the_storage(make, name):
    """is_donated is True exactly where a read raises; to ask changes nothing."""
    view_of = VIEWS.get(name) or WHOLES[name]
    for updated, ask_first, synced in itertools.product((False, True), repeat=3):
        t = make(2, 2)
        if updated:
            t.add_(0)
            torch_xla.sync()
        view = view_of(t)
        if synced:
            torch_xla.sync()
        assert not is_donated(view)
        donate_buffer(t)
        later = view_of(t)
        taken = t + 1
        if ask_first:
            assert not is_donated(view)
        torch_xla.sync()
        assert is_donated(t)
        consumed = [view] if name in VIEWS else [view, later]
        if name in VIEWS:  # a view between the mark and the step keeps its value
            assert not is_donated(later)
            assert later.tolist() == view_of(torch.arange(4.0).reshape(2, 2)).tolist()
        for one, use in itertools.product(consumed, (torch.Tensor.tolist, lambda t: t + 1)):
            assert is_donated(one)
            with pytest.raises(DonatedBufferError, match="was donated at"):
                use(one)
        assert is_donated(view)
        t.copy_(taken)
        assert not is_donated(view)
        assert view.tolist() == view_of(taken).tolist()


def test_foreach_zero_of_others_beside_a_donation_is_right(make):
    old, others = make(4), [make(3), make(2)]
    donate_buffer(old)
    torch._foreach_zero_(others)
    new = old + 1
    torch_xla.sync(wait=True)
    assert [t.tolist() for t in others] == [[0, 0, 0], [0, 0]] and new.tolist() == [1, 2, 3, 4]


def test_an_interrupt_while_a_write_is_refused_leaves_no_write(make):
    """The exception of a signal reaches the program, and the next step finds nothing of the write."""

    class InterruptedNames:
        """Names of leaves whose text comes with an interrupt, as if a signal had come while an error is described."""

        interrupts = 0

        def name(self, index):
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return "w"

    t, names = make(4, 4), InterruptedNames()
    donate_buffer(make(1))  # the layouts are checked
    assert isinstance(_C.mark([t], f"{__file__}:1", False, names, {}), _C.Call)
    row = t[1]  # has its own value
    taken = t * 2
    torch_xla.sync(wait=True)
    with pytest.raises(DonatedBufferError, match="'w'"):
        row.fill_(3)
    names.interrupts = 1
    with pytest.raises(KeyboardInterrupt):
        row.fill_(3)
    with auto_donate():
        torch_xla.sync()
    assert torch.equal(taken.cpu(), torch.arange(16.0).reshape(4, 4) * 2)
