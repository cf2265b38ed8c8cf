"""auto_donate: what is donated by liveness, and what is not."""

from __future__ import annotations

import contextlib
import gc
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import compiles, no_collections, pointer

from torch_xla_donate import (
    _C,
    DonationWarning,
    auto_donate,
    debug_nans,
    donate_buffer,
    donation_disabled,
    donation_report,
    set_auto_donate,
)
from torch_xla_donate._modes import debug


def last_step():
    return donation_report(steps=1).donors


def donated() -> list[str]:
    """The arrays that the last step has donated automatically."""
    return [donor.array for donor in last_step() if donor.automatic and donor.outcome == "donated"]


def held() -> list[str]:
    """The arrays that outputs of the last step could have reused, if nothing held them."""
    return [held.array for held in donation_report().held]


@pytest.fixture(autouse=True)
def _auto():
    with auto_donate():
        yield


# --- What is not donated. Each test also shows that the step, or the next one, donates what nothing holds. ---


#: What holds a tensor, and how to find the tensor's value in it.
HOLDERS = {
    "variable": (lambda t: t, lambda kept: kept),
    "view": (lambda t: t[1:], lambda kept: torch.cat([torch.zeros(1), kept.cpu()])),
    "base of a view": (lambda t: t[1:], lambda kept: kept._base),
    "detach": (lambda t: t.detach(), lambda kept: kept),
    "data": (lambda t: t.data, lambda kept: kept),
    "pending clone": (lambda t: t.clone(), lambda kept: kept),
    "whole copy": (lambda t: torch.zeros_like(t).copy_(t), lambda kept: kept),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_held_input_keeps_its_value(make, name):
    hold, find = HOLDERS[name]
    t = make(6)
    kept = hold(t)
    for _ in range(2):
        t = t * 2
        torch_xla.sync()
    assert [donor.outcome for donor in last_step()] == ["donated"]  # the middle value, which nothing holds
    assert find(kept).tolist() == [0, 1, 2, 3, 4, 5]
    assert t.tolist() == [0, 4, 8, 12, 16, 20]


def test_an_input_that_a_backward_pass_will_read_is_kept(make):
    x, w = make(4), make(4).requires_grad_()
    y = (x * w).sum()
    x = x + 1
    torch_xla.sync()
    assert donated() == [] and "f32[4]" in held()
    y.backward()
    assert w.grad.tolist() == [0, 1, 2, 3] and x.tolist() == [1, 2, 3, 4]
    del y
    x = x + 1
    torch_xla.sync()
    assert "f32[4]" in donated()


@pytest.mark.parametrize("keep", [lambda loss: loss, lambda loss: loss.detach(), lambda loss: None])
def test_the_graph_of_a_live_loss_holds_the_old_parameters(make, keep):
    p, m, x = make(6, 6), make(6, 6), make(3, 6)
    for _ in range(4):
        before = p.cpu()
        loss = (x @ p.requires_grad_()).mean()
        (gradient,) = torch.autograd.grad(loss, [p])
        m = 0.9 * m + gradient
        p = (p - 0.1 * m).detach()
        loss = keep(loss)
        torch_xla.sync(wait=True)
        holds = loss is not None and loss.requires_grad
        assert donated() == ["f32[6,6]"] * (1 if holds else 2)
        assert held() == ["f32[6,6]"] * holds
        if holds:
            parameter = loss.grad_fn.next_functions[0][0].next_functions[1][0].variable  # of the mean, of the product
            assert torch.equal(parameter.detach().cpu(), before)


def test_a_step_closure_reads_the_value_it_was_given(make):
    seen = []
    t = make(4)
    xm.add_step_closure(lambda value: seen.append(value.tolist()), args=(t,))
    t = t + 1
    torch_xla.sync()
    assert donated() == [] and held() == ["f32[4]"]
    assert seen == [[0, 1, 2, 3]] and t.tolist() == [1, 2, 3, 4]


def test_a_step_closure_may_reduce_after_a_step_that_has_reduced(make):
    reduce = torch_xla._XLAC._xla_all_reduce
    seen = []

    def closure():
        seen.append(reduce("sum", make(4), 1.0, [], False).tolist())

    t = make(4)
    t = reduce("sum", t, 1.0, [], False) + 1
    xm.add_step_closure(closure)
    torch_xla.sync()
    assert donated() == ["f32[4]"]
    assert seen == [[0, 1, 2, 3]] and t.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("marks", [True, False])
def test_collectives_are_forgotten_however_a_step_is_asked_for(make, marks):
    device = str(torch_xla.device())
    ways = [
        torch_xla.sync,
        lambda: torch_xla._XLAC._xla_step_marker(device, [], True),
        lambda: torch_xla._XLAC._xla_sync_live_tensors(device, [], True),
    ]
    p = make(4, 3)
    with auto_donate(not marks):
        for way in ways:
            for count in range(4):
                compiled = compiles()
                reduced, old = [p * 1], p
                torch_xla._XLAC._xla_all_reduce_inplace("sum", reduced, 1.0, [[0]], True)
                p = reduced[0] + 1
                if marks:
                    donate_buffer(old)
                del reduced, old
                way()
                assert [donor.outcome for donor in last_step()] == ["donated"]
                assert count == 0 or compiles() == compiled
    assert p.tolist() == (torch.arange(12.0).reshape(4, 3) + 12).tolist()


def test_listing_live_tensors_keeps_the_order_of_collectives(make):
    first, second = [make(4) + 1], [make(4) + 2]
    for reduced in (first, second):
        torch_xla._XLAC._xla_all_reduce_inplace("sum", reduced, 1.0, [[0]], True)
        torch_xla._XLAC._check_device_tensor_need_materialization("xla:0")  # lists the live tensors
    text = torch_xla._XLAC._get_xla_tensors_text(second)
    assert text.count("cross_replica_sum") == 2, text


def test_a_partial_sync_donates_nothing(make):
    before = donation_report().donors[-1:]
    t = make(4)
    t = t + 1
    assert t.sum().item() == 10
    assert "1., 2." in str(t)
    pending, other = t * 3, t + 1
    del t
    torch_xla._XLAC._xla_sync_multi([other], [], True, True)
    assert donation_report().donors[-1:] == before
    torch_xla.sync()  # of what is still pending
    assert donated() == ["f32[4]"]
    assert pending.tolist() == [3, 6, 9, 12] and other.tolist() == [2, 3, 4, 5]


def test_inputs_are_donated_only_where_an_output_has_their_size(make):
    t = make(64)
    total = t.sum()
    del t
    torch_xla.sync()
    assert total.item() == 2016
    assert last_step() == ()
    inputs = [make(7) for _ in range(4)]
    total = sum(inputs)
    del inputs
    torch_xla.sync()
    assert donated() == ["f32[7]"] and total.tolist() == [4 * i for i in range(7)]


def test_shared_constants_survive(make):
    t, u = torch.tensor(42.0, device="xla"), make(4).sum()
    torch_xla.sync()
    t, u = t + 1, u + 1
    torch_xla.sync()
    assert donated() == ["f32[]"]  # the sum, and not the constant
    assert (t.item(), u.item()) == (43, 7)
    assert torch.tensor(42.0, device="xla").item() == 42


def test_a_tensor_of_the_random_seed_does_not_offer_it(make):
    kept, free = make(1, dtype=torch.int64), make(3)
    seed = torch_xla._XLAC._get_base_seed_as_tensor("xla:0")
    numbers, changed, other = torch.rand(3, device="xla") + free, seed + 1, kept + 1
    del seed, free
    torch_xla._XLAC._xla_sync_live_tensors("xla:0", [], True)
    assert donated() == ["f32[3]"]
    more = torch.rand(3, device="xla")
    torch_xla.sync()
    numbers = numbers.cpu() - torch.arange(3.0)
    assert len({*numbers.tolist(), *more.tolist()}) == 6
    assert other.tolist() == [1] and changed.shape == ()


def test_the_random_seed_itself_is_never_donated(make):
    """Its buffer has 8 bytes and no note of torch_xla. This sync does not give it a new one at its end."""
    kept, t = make(2), make(3)
    for _ in range(2):
        noise = torch.rand(2, device="xla") + kept
        count = (kept.sum() + 3).to(torch.int64)
        t = t + 1
        torch_xla._XLAC._xla_sync_live_tensors(str(kept.device), [], True)
        assert donated() == ["f32[3]"]
        assert count.item() == 4 and (noise.cpu() >= kept.cpu()).all()
    assert torch.rand(2, device="xla").cpu().shape == (2,)


def test_the_random_seed_is_no_free_input_for_advice(make):
    kept = make(1, dtype=torch.int64)
    steps = []
    with debug.listening(steps.append):
        numbers, other = torch.rand(3, device="xla"), kept + 1
        torch_xla.sync()
    (step,) = steps
    assert {given.array.split("]")[0]: given.use for given in step.inputs} == {"s64[": "other", "s64[1": "held"}
    assert numbers.shape == (3,) and other.tolist() == [1]


def test_memory_that_dlpack_shows_does_not_change(make):
    from torch_xla.utils.dlpack import to_dlpack

    t = make(1024)
    outside = torch.utils.dlpack.from_dlpack(to_dlpack(t))
    for count in (1, 2):
        t = t * 2
        torch_xla.sync(wait=True)
        assert len(donated()) == count - 1  # the buffer of the first step is exported
    assert outside.tolist() == list(range(1024)) and t[5].item() == 20


def test_tensors_updated_in_place_are_left_to_torch_xla(make):
    t = make(4)
    place = pointer(t)
    t.add_(1)
    torch_xla.sync(wait=True)
    assert pointer(t) == place and last_step() == ()


# --- What the report says of it ---


def test_the_report_lists_held_inputs_that_outputs_could_take(make):
    weights, kept = [make(9), make(9), make(9)], []
    for holds in (True, False, True):
        kept = weights[:2] if holds else []
        weights = [w * 2 for w in weights]
        torch_xla.sync()
        report = donation_report()
        one = ("f32[9]", 36, "CPU:0")
        assert [(h.array, h.bytes, h.device) for h in report.held] == ([one] * 2 if holds else [])
        assert [h.holder.partition(" at ")[0] for h in report.held] == (["kept[0]", "kept[1]"] if holds else [])
        assert donated() == ["f32[9]"] * (1 if holds else 3)
    assert str(report).endswith(
        "\nauto_donate skipped these inputs of the last step, which outputs could have reused:"
        + "".join(f"\n  1 x f32[9] (36 B): held by {held.holder}" for held in report.held)
    )
    assert report.to_dict()["held"] == [
        {"array": "f32[9]", "bytes": 36, "device": "CPU:0", "holder": held.holder} for held in report.held
    ]
    assert [t.tolist() for t in kept] == [[4 * i for i in range(9)]] * 2


def test_what_no_output_could_have_taken_is_not_listed(make):
    kept, dead, large = make(9), make(9), make(10)
    _out = kept + dead + large.sum()  # the only output of 36 bytes goes to the dead one, and none is of 40
    del dead
    torch_xla.sync()
    assert donated() == ["f32[9]"] and held() == []


def test_the_report_shows_only_what_the_last_step_left_alone(make):
    p = make(6)
    for leave_out in (lambda: auto_donate(False), donation_disabled):
        old, p = p, p + 1
        torch_xla.sync()
        assert held() == ["f32[6]"]
        torch_xla.sync()  # with nothing to do it is not a step
        assert old.tolist() != p.tolist() and held() == ["f32[6]"]
        with leave_out():
            p = p + 1
            torch_xla.sync()
        assert held() == []


# --- With marks, and without ---


def test_marks_come_first_and_the_report_tells_which_is_which(make):
    dead, marked = make(9), make(9)
    out = dead + marked
    del dead
    donate_buffer(marked)
    torch_xla.sync()
    (donor,) = last_step()
    assert donor.outcome == "donated" and not donor.automatic and "test_auto.py" in donor.where
    assert out.tolist() == [2 * i for i in range(9)]

    # The same graph and the same donors, whichever of them is marked.
    for marked in (0, 1):
        pair = [make(5), make(5)]
        donate_buffer(pair[marked])
        pair = [pair[0] * 2, pair[1] * 3]
        torch_xla.sync(wait=True)
        assert sorted((donor.automatic, donor.outcome) for donor in last_step()) == [
            (False, "donated"),
            (True, "donated"),
        ]
    assert "(auto)" in str(donation_report(steps=1))
    assert {item["automatic"] for item in donation_report(steps=1).to_dict()["donors"]} == {True, False}


def test_into_is_kept_beside_automatic_donors(make):
    a, b, dead = make(9), make(9), make(9)
    places = pointer(a), pointer(b)
    first, second, third = a + b, a * b, dead + 1
    del dead
    donate_buffer([a, b], into=[second, first])
    torch_xla.sync()
    assert [donor.into_kept for donor in last_step() if not donor.automatic] == [True, True]
    assert (pointer(second), pointer(first)) == places
    assert third.tolist() == list(range(1, 10))


def test_nothing_is_donated_where_donation_is_disabled(make):
    t = make(4)

    def step():
        nonlocal t
        t = t + 1
        torch_xla.sync()
        return len(donated())

    with donation_disabled():
        assert step() == 0
    with debug_nans():
        assert step() == 0
    with auto_donate(False):
        assert step() == 0
        with auto_donate():
            assert step() == 1
        assert step() == 0
        assert auto_donate()(step)() == 1
        assert step() == 0
    assert step() == 1
    assert t.tolist() == [8, 9, 10, 11]


def on_another_thread():
    with ThreadPoolExecutor(1) as other:
        return other.submit(_C.auto_donates).result()


def test_a_context_holds_for_its_thread_and_a_call_for_all():
    assert _C.auto_donates() and not on_another_thread()
    try:
        set_auto_donate(True)
        assert on_another_thread()
        with auto_donate(False):
            assert not _C.auto_donates() and on_another_thread()
    finally:
        set_auto_donate(False)
    assert not on_another_thread()


def test_an_argument_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match=r"enabled is of type Tensor, not a bool\..*donate_buffer"):
        set_auto_donate(torch.tensor(1))  # type: ignore[arg-type]
    assert not on_another_thread()


def test_a_call_that_is_never_entered_warns_of_its_line():
    with pytest.warns(DonationWarning, match=r"no effect without `with`.* Call set_auto_donate\(True\)") as caught:
        auto_donate()
    assert (caught[0].filename, caught[0].lineno) == (__file__, sys._getframe().f_lineno - 1)
    assert not on_another_thread()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.ExitStack() as stack:
            stack.enter_context(auto_donate(False))
        auto_donate()(lambda: None)()


@no_collections()  # which run code of other objects
def test_an_entered_mode_runs_no_code_when_it_goes():
    """An interrupt in it would be lost."""
    with auto_donate() as mode:
        pass
    called = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name))
    del mode
    sys.setprofile(None)
    assert called == ["test_an_entered_mode_runs_no_code_when_it_goes"]  # calls setprofile


# --- Graphs ---


def test_inputs_that_are_free_at_some_steps_only_cost_a_few_graphs():
    inputs = [torch.arange(5.0).to("xla") for _ in range(6)]
    torch_xla.sync(wait=True)
    start, kept = compiles(), []
    for i in range(40):
        kept = [inputs[j] for j in range(6) if (i * 7 + 3) >> j & 1]
        inputs = [t + 1 for t in inputs]
        torch_xla.sync()
        if i == 25:
            settled = compiles()
    assert compiles() - start <= 6 and compiles() == settled
    assert all(t.tolist() == [40 + k for k in range(5)] for t in inputs)
    del kept


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "not_waiting"])
@no_collections()
def test_a_steady_loop_compiles_once_whenever_garbage_goes(make, wait):
    p = make(11)
    start = None
    for i in range(30):
        old, p = p, p * 1.5
        if i % 3 == 0:
            cycle = [old]
            cycle.append(cycle)
            del cycle
        del old
        torch_xla.sync(wait=wait)
        if i % 7 == 0:
            gc.collect()
        if i == 10:
            start, sizes = compiles(), _C.sizes()
    assert compiles() == start
    after = _C.sizes()
    assert after["auto_plans"] <= sizes["auto_plans"] and after["bases"] <= sizes["bases"]


def test_a_loop_with_a_loader_thread_compiles_once(make):
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    data = [torch.full((4, 3), float(i)) for i in range(12)]
    p = make(4, 3)
    place, counts = pointer(p), []
    for batch in MpDeviceLoader(data, "xla"):
        p = p + batch
        counts.append(compiles())
    torch_xla.sync()
    assert p.sum().item() == 66 + 12 * sum(range(12))
    assert len(set(counts[3:])) == 1
    assert pointer(p) == place


def test_an_input_that_no_output_can_take_compiles_nothing(make):
    counts, kept = [], []
    for keep in (False, True):
        p, g = make(5), make(5)
        kept += [g] if keep else []
        p = p + g
        del g
        torch_xla.sync()
        counts.append(compiles())
        assert donated() == ["f32[5]"]
    assert counts[0] == counts[1]
    assert kept[0].tolist() == [0, 1, 2, 3, 4]


def test_a_step_without_inputs_is_the_same_graph_with_and_without():
    counts = []
    for automatic in (False, True):
        with auto_donate(automatic):
            zeros = torch.zeros(29, device="xla")
            torch_xla.sync()
        assert zeros.sum().item() == 0
        counts.append(compiles())
    assert counts[0] == counts[1]
