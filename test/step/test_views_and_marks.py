"""Views around a mark: taken between the mark and the step they keep their value, taken before it they raise."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch_xla
from helpers import consume

from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    cancel_donation,
    compile,
    donate_buffer,
    donation_report,
    is_donated,
)

VIEWS = {
    "row": lambda t: t[1],
    "element": lambda t: t[1, 2],
    "slice": lambda t: t[1:3],
    "strided slice": lambda t: t[::2],
    "whole slice": lambda t: t[:],
    "column": lambda t: t[:, 1],
    "transpose": lambda t: t.t(),
    "permute": lambda t: t.permute(1, 0),
    "reshape": lambda t: t.reshape(-1),
    "view": lambda t: t.view(2, -1),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "expand": lambda t: t.unsqueeze(0).expand(3, *t.shape),
    "diagonal": lambda t: t.diagonal(),
    "as_strided": lambda t: t.as_strided((2, 2), (1, 2)),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "dtype": lambda t: t.view(torch.int32),
    "split": lambda t: t.split(1)[1],
    "unbind": lambda t: t.unbind()[1],
    "view of a view": lambda t: t[1:][1],
    "view of a view of a view": lambda t: t.t()[1:].reshape(-1)[2:5],
}


def as_made(t):
    pass


def updated_before(t):
    t.add_(7)


def written_by_slices_before(t):
    t[0] = 5


STATES = (as_made, updated_before, written_by_slices_before)
MODES = (contextlib.nullcontext, torch.no_grad, torch.inference_mode)


def in_state(make, state):
    """A tensor of the device with its copy on the host."""
    t, copy = make(4, 4), torch.arange(16.0).reshape(4, 4)
    state(t)
    state(copy)
    torch_xla.sync(wait=True)
    return t, copy


def outcomes():
    return [donor.outcome for donor in donation_report(steps=1).donors]


def pairwise(names):
    """Parametrizes with the names, each with three pairs of a state and a mode: each state and each mode occurs."""
    cases = [(name, [(STATES[k], MODES[(k + i) % 3]) for k in range(3)]) for i, name in enumerate(names)]
    return pytest.mark.parametrize(("name", "pairs"), cases, ids=[name for name, _ in cases])


@pairwise(VIEWS)
def test_a_view_between_the_mark_and_the_step_keeps_its_value(make, name, pairs):
    view = VIEWS[name]
    for state, mode in pairs:
        with mode():
            t, copy = in_state(make, state)
            taken, result = consume(t, lambda t: (view(t), t * 2), wait=True)
            assert torch.equal(taken.cpu(), view(copy))
            assert torch.equal(result.cpu(), copy * 2)
            # It is a tensor like any other from now on.
            again, more = taken + 1, taken.detach()
            torch_xla.sync()
            assert torch.equal(again.cpu(), view(copy) + 1) and torch.equal(more.cpu(), view(copy))


USES = {
    "element": lambda v: v[0],
    "slice": lambda v: v[:1],
    "detach": lambda v: v.detach(),
    ".data": lambda v: v.data,
    "reshape": lambda v: v.reshape(-1),
    "transpose": lambda v: v.transpose(0, -1),
    "unbind": lambda v: v.unbind()[0],
    "alias": lambda v: torch.ops.aten.alias(v),
}


@pairwise(USES)
def test_a_view_of_an_earlier_view_keeps_its_value(make, name, pairs):
    use = USES[name]
    for state, mode in pairs:
        with mode():
            t, copy = in_state(make, state)
            view = t[1:3]
            taken, result = consume(t, lambda t, view=view: (use(view), t * 2), wait=True)
            assert torch.equal(taken.cpu(), use(copy[1:3]))
            assert torch.equal(result.cpu(), copy * 2)
            with pytest.raises(DonatedBufferError, match="was donated at"):
                view.cpu()


IN_PLACE = {
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "squeeze_": lambda t: t.squeeze_(),
    "transpose_": lambda t: t.transpose_(0, 1),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_tensor_made_a_view_in_place_keeps_its_value(make, name):
    for state, of in itertools.product(STATES, ["tensor", "view", "earlier view"]):
        t, copy = in_state(make, state)
        earlier = t[1:3]
        donate_buffer(t)
        turned = t if of == "tensor" else earlier if of == "earlier view" else t[1:3]
        expected = copy if of == "tensor" else copy[1:3]
        IN_PLACE[name](turned)
        IN_PLACE[name](expected)
        result = t * 2
        torch_xla.sync(wait=True)
        assert outcomes() == ["donated"]
        assert torch.equal(result.cpu(), copy * 2)
        assert turned.shape == expected.shape and torch.equal(turned.cpu(), expected)


@pytest.mark.parametrize("state", STATES)
def test_a_view_that_outlived_its_base_has_views_and_is_donated(make, state):
    t, copy = in_state(make, state)
    kept, _ = consume(t, lambda t: (t[1:], t * 2), wait=True)
    del t
    views = [kept[0], kept.t(), kept.detach(), kept.data, kept[1:][0], kept.reshape(-1), *kept.unbind()]
    expected = [copy[1], copy[1:].t(), copy[1:], copy[1:], copy[2], copy[1:].reshape(-1), *copy[1:].unbind()]
    torch_xla.sync(wait=True)
    assert all(torch.equal(view.cpu(), value) for view, value in zip(views, expected, strict=True))
    row, result = consume(kept, lambda kept: (kept[0], kept + 1), wait=True)
    assert torch.equal(row.cpu(), copy[1]) and torch.equal(result.cpu(), copy[1:] + 1)
    with pytest.raises(DonatedBufferError):
        kept.cpu()


def test_a_tensor_of_the_same_buffer_keeps_it_from_being_donated(make):
    t = make(4, 4)
    donate_buffer(t)
    alias = torch.ops.aten.alias(t)
    result = t * 2
    with pytest.warns(DonationWarning, match="another live tensor, which was not donated, holds the same buffer"):
        torch_xla.sync(wait=True)
    assert not is_donated(t) and alias[0].tolist() == [0, 1, 2, 3] and result[0].tolist() == [0, 2, 4, 6]


def test_a_view_sees_what_is_written_before_the_step(make):
    t, copy = in_state(make, updated_before)
    donate_buffer(t)
    row, column = t[1], t[:, 0]
    t[1] = 3
    copy[1] = 3
    column.mul_(2)
    copy[:, 0].mul_(2)
    torch_xla.sync(wait=True)
    assert outcomes() == ["donated"]
    assert torch.equal(row.cpu(), copy[1]) and torch.equal(column.cpu(), copy[:, 0]) and torch.equal(t.cpu(), copy)


def test_gradients_flow_through_views_between_mark_and_step(make):
    t, copy = in_state(make, updated_before)
    for one in (t, copy):
        one.requires_grad_()
    donate_buffer(t)
    losses = [(one[1:3].t() * one[0, :2]).sum() for one in (t[:, 1:3], copy[:, 1:3])]
    views = [one[1:3] for one in (t, copy)]
    gradients = [torch.autograd.grad(loss, one)[0] for loss, one in zip(losses, (t, copy))]
    torch_xla.sync(wait=True)
    assert is_donated(t)
    assert torch.equal(gradients[0].cpu(), gradients[1]) and torch.equal(losses[0].cpu(), losses[1])
    assert torch.equal(views[0].cpu(), views[1])


def updated_in_place(s):
    s[0].add_(1)
    return [s[0], s[0].t()]


def written_by_slices(s):
    s[0][0] = s[0][0] + 7
    return [s[0] + 1, s[1] + 1]


BODIES = {
    "both updated": lambda s: [s[0] + 1, s[1] + 1],
    "a result and its view": lambda s: [x := s[0] + 1, x.t()],
    "a view and its result": lambda s: [(x := s[1] + 1).t(), x],
    "views alone": lambda s: [s[0].t(), s[1].t()],
    "views of the view": lambda s: [s[1].t() + 1, s[1][:] + 1],
    "updated in place": updated_in_place,
    "written by slices": written_by_slices,
    "swapped": lambda s: [s[1], s[0]],
}


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_tensor_and_its_view_are_the_state_of_a_compiled_loop(make, body):
    expected = [torch.arange(16.0).reshape(4, 4)]
    state, free = [make(4, 4)], make(5)
    for one in (expected, state):
        one.append(one[0].t())
    step = compile(lambda state, free: (body(state), free + 1), donate_argnums=(0, 1))
    for _ in range(6):
        # The host computes on copies: the views of one call are not aliases in the next.
        expected = [t.clone() for t in body(expected)] if body is not updated_in_place else body(expected)
        old = free
        state, free = step(state, free)
        assert is_donated(old)
    assert all(torch.equal(t.cpu(), value) for t, value in zip(state, expected, strict=True))


def test_a_dropped_view_of_a_marked_tensor_costs_nothing(make):
    t, _ = in_state(make, updated_before)
    donate_buffer(t)
    row = t[1]
    del row
    result = t * 2
    live = torch_xla._XLAC._get_xla_tensors_hlo([result])
    torch_xla.sync(wait=True)
    assert "slice" not in live and is_donated(t)


def test_views_of_an_unusable_donor_keep_their_value(make):
    t, copy = in_state(make, updated_before)
    before = t[1]
    donate_buffer(t)
    between = t[1]
    total = t.sum()
    with pytest.warns(DonationWarning, match="not usable"):
        torch_xla.sync(wait=True)
    assert torch.equal(before.cpu(), copy[1]) and torch.equal(between.cpu(), copy[1]) and total.item() == copy.sum()


@pytest.mark.parametrize(
    "alias",
    [torch.Tensor.detach, lambda v: v.view(2), lambda v: v[0:1], lambda v: v.data, lambda v: v + 0],
    ids=["detach", "view", "slice", "data", "operation"],
)
def test_aliases_of_a_failed_update_do_not_show_it(make, alias):
    t = make(4)
    view, out = consume(t, lambda t: (t[:2], t + 1))
    with pytest.raises(DonatedBufferError):
        view.add_(10)
    with pytest.raises(DonatedBufferError):
        alias(view).tolist()
    t.copy_(torch.ones(4))  # usable again, and with it its views
    assert alias(view).tolist() == [1, 1][: alias(view).numel()] and out.tolist() == [1, 2, 3, 4]


WRITTEN = [1.0, *(2.0 * i for i in range(1, 24))]


def written(make, view=lambda base: base.reshape(4, 6)):
    """A tensor that was written in place, and a view of it, which torch computes again from its base."""
    base = make(24) * 2
    base[0] = torch.ones((), device="xla")
    whole = view(base)
    torch_xla.sync(wait=True)
    return base, whole


def test_a_loop_over_a_reshape_of_a_written_tensor_donates(make):
    """Its state has all bytes of its base, so the base's buffer is donated."""

    def update(state, row):
        new = state.reshape(24) * 1.5
        new[row] = 7.0
        return new.reshape(4, 6)

    state = make(24).reshape(4, 6)
    copy = state.cpu()
    for i in range(6):
        with donate_buffer(state):
            state = update(state, i)
        copy = update(copy, i)
        torch_xla.sync(wait=True)
        (donor,) = donation_report(steps=1).donors
        assert donor.outcome == "donated" and donor.bytes == 96
    assert torch.equal(state.cpu(), copy)


@pytest.mark.parametrize(
    ("used", "cancelled"), [(False, True), (True, True), (True, False)], ids=["cancelled", "used, cancelled", "used"]
)
def test_a_marked_reshape_that_is_cancelled_or_stays_in_use_keeps_its_value(make, used, cancelled):
    base, whole = written(make)
    donate_buffer(whole)
    more = whole + 1 if used else None  # computes the view, which is then an output of the step
    if cancelled:
        cancel_donation(whole)
        assert not _C.pending()
    torch_xla.sync(wait=True)
    assert cancelled or outcomes() == ["donated"]
    assert (is_donated(base), is_donated(whole)) == (not cancelled, False)
    assert whole.flatten().tolist() == WRITTEN
    assert more is None or more.flatten().tolist() == [value + 1 for value in WRITTEN]


def test_a_reshape_that_was_used_is_refused(make):
    """The next step computes it, so it would be an output beside the donated base."""
    base, whole = written(make)
    out = whole * 2
    with pytest.raises(DonationError, match="a view, which torch_xla computes from its base"):
        donate_buffer(whole)
    torch_xla.sync(wait=True)
    assert not is_donated(base) and base.tolist() == WRITTEN
    assert torch.equal(out.cpu(), 2 * whole.cpu())


PARTS = {
    "part": lambda t: t[1:],
    "expand": lambda t: t.expand(2, 24),
    "one element": lambda t: t[:1].expand(24),
    "half twice": lambda t: t[:12].expand(2, 12),
    "as_strided": lambda t: t.as_strided((4, 6), (1, 1)),
    "reversed": lambda t: t[::2].unsqueeze(0).expand(2, 12),
}


def test_a_view_without_all_elements_of_its_base_is_refused(make):
    """Also if it has as many bytes as the base: its mark would consume elements that it does not show."""
    for view in PARTS.values():
        base, part = written(make, view)
        base.add_(0)  # a view that a step has computed has a buffer, and a mark takes that one
        torch_xla.sync(wait=True)
        with pytest.raises(DonationError, match="a view, which torch_xla computes from its base"):
            donate_buffer(part)
        assert not _C.pending() and base.tolist() == WRITTEN


@pytest.mark.parametrize("view", [lambda t: t[:13].unfold(0, 2, 1), lambda t: t.view(torch.int32)])
def test_a_view_that_torch_xla_copies_has_a_mark_for_itself(make, view):
    base, copied = written(make, view)
    assert consume(copied, wait=True).shape == copied.shape and not is_donated(base)
    assert base.tolist() == WRITTEN


REARRANGED = {
    "reshape": lambda t: t.reshape(4, 6),
    "transpose": lambda t: t.view(4, 6).t(),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.view(1, 24).squeeze(0),
    "flatten": lambda t: t.view(2, 3, 4).permute(2, 0, 1),
}


def test_a_view_with_all_elements_of_its_base_donates_it(make):
    """Both are consumed, as they share memory in PyTorch, and the error names the mark."""
    for (name, view), dropped in itertools.product(REARRANGED.items(), (False, True)):
        base, whole = written(make, view)
        donate_buffer(whole)
        out, kept = base + 1, [] if dropped else [whole, base]
        del base, whole
        torch_xla.sync(wait=True)
        assert outcomes() == ["donated"], name
        for t in kept:
            assert is_donated(t)
            with pytest.raises(DonatedBufferError, match=r"f32\[24\] tensor was donated at .*test_views_and_marks.py"):
                t.cpu()
        assert out.tolist() == [value + 1 for value in WRITTEN]


def test_a_part_of_a_marked_tensor_is_not_marked(make):
    """To cancel it leaves the mark, and another donor may go into it."""
    t, other = make(8), make(4)
    donate_buffer(t)
    part = t[:4]
    cancel_donation(part)
    assert _C.state(part) == "pending" and len(_C.pending()) == 1
    donate_buffer(other, into=part)
    more, last = t + 1, other + 1
    torch_xla.sync(wait=True)
    assert outcomes() == ["donated"] * 2
    assert part.tolist() == [0, 1, 2, 3] and last.tolist() == [1, 2, 3, 4] and more.tolist() == list(range(1, 9))
