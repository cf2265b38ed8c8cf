"""auto_donate: what is donated by liveness, and what is not."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from signal import SIGALRM, SIGINT, default_int_handler, raise_signal
from signal import signal as handle_signal

import bare
import numpy as np
import pytest
import ranks
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from children import in_process, run_in_child
from helpers import loops_with_and_without_donation, pointer
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

import torch_xla_donate
from torch_xla_donate import (
    _C,
    DonationWarning,
    _host,
    auto_donate,
    donate_buffer,
    donation_disabled,
    donation_report,
    hlo,
    set_auto_donate,
)
from torch_xla_donate._modes import debug

SWITCHED_ON = {"TORCH_XLA_DONATE_AUTO": "1"}


def compiles() -> int:
    return int(metrics.metric_data("CompileTime")[0]) if metrics.metric_data("CompileTime") else 0


def last_step():
    return donation_report(steps=1).donors


def donated() -> list[str]:
    """The arrays that the last step has donated automatically."""
    return [donor.array for donor in last_step() if donor.automatic and donor.outcome == "donated"]


def steps_so_far() -> int:
    donors = donation_report().donors
    return donors[-1].step if donors else 0


@pytest.fixture(autouse=True)
def _auto():
    with auto_donate():
        yield


# --- What is donated ---


def test_an_input_that_nothing_holds_gives_its_memory_away(make):
    p, g = make(8, 4), make(8, 4)
    place = pointer(p)
    p = p - 0.5 * g
    torch_xla.sync()
    assert pointer(p) == place
    assert donated() == ["f32[8,4]"]
    assert torch.equal(p.cpu(), torch.arange(32.0).reshape(8, 4) * 0.5)


@in_process(env=SWITCHED_ON)
def test_the_hlo_has_the_donor_before_and_the_alias_after(dump_folder):
    p = torch.ones(8, 4).to("xla")
    g = torch.ones(8, 4).to("xla")
    torch_xla.sync(wait=True)
    p = p - 0.5 * g
    torch_xla.sync(wait=True)
    modules = [m for m in hlo.read_dump(dump_folder) if m.before is not None and m.before.donors]
    (module,) = modules
    (donor,) = module.before.donors
    (alias,) = module.after.aliases
    assert alias.donor == donor


def test_functional_adam_keeps_every_pointer_and_compiles_once(make):
    p, m, v, g = make(16, 4), make(16, 4), make(16, 4), make(16, 4)
    places = [pointer(t) for t in (p, m, v)]
    counts = []
    for _ in range(4):
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        p = p - 0.1 * m / (v.sqrt() + 1e-8)
        torch_xla.sync()
        counts.append(compiles())
    assert [pointer(t) for t in (p, m, v)] == places
    assert counts[0] == counts[-1]
    assert donated() == ["f32[16,4]"] * 3


def test_average_weights_and_dropped_gradients_are_donated(make):
    weight, average = make(8), make(8)
    for _ in range(2):
        average = 0.9 * average + 0.1 * weight
        torch_xla.sync()
        assert donated() == ["f32[8]"]


# --- What is not ---


def held_by_variable(t):
    return t, lambda kept: kept


def held_by_list(t):
    return [t], lambda kept: kept[0]


def held_by_closure(t):
    return (lambda: t), lambda kept: kept()


def held_by_cycle(t):
    class Cycle:
        pass

    cycle = Cycle()
    cycle.tensor, cycle.myself = t, cycle
    reference = weakref.ref(cycle)
    del cycle
    return reference, lambda kept: kept().tensor


def held_by_view(t):
    return t[1:], lambda kept: kept._base


def held_by_detached(t):
    return t.detach(), lambda kept: kept


def held_by_data(t):
    return t.data, lambda kept: kept


def held_by_pending_clone(t):
    return t.clone(), lambda kept: kept


def held_by_whole_copy(t):
    kept = torch.zeros_like(t)
    kept.copy_(t)
    return kept, lambda kept: kept


@pytest.mark.parametrize(
    "hold",
    [
        held_by_variable,
        held_by_list,
        held_by_closure,
        held_by_cycle,
        held_by_view,
        held_by_detached,
        held_by_data,
        held_by_pending_clone,
        held_by_whole_copy,
    ],
    ids=lambda hold: hold.__name__,
)
def test_what_somebody_holds_keeps_its_value(make, hold):
    gc.disable()
    try:
        t = make(6)
        kept, get = hold(t)
        t = t * 2
        torch_xla.sync()
        t = t * 2
        torch_xla.sync()
        assert [donor.outcome for donor in last_step()] == ["donated"]  # the middle value, which nothing holds
        assert get(kept).tolist() == [0, 1, 2, 3, 4, 5]
        assert t.tolist() == [0, 4, 8, 12, 16, 20]
    finally:
        gc.enable()


def test_a_view_keeps_the_value_of_its_base(make):
    t = make(6)
    view = t[2:]
    t = t * 2
    torch_xla.sync()
    assert view.tolist() == [2, 3, 4, 5] and t.tolist() == [0, 2, 4, 6, 8, 10]


def test_what_backward_will_read_is_kept(make):
    x, w = make(4), make(4).requires_grad_()
    y = (x * w).sum()
    x = x + 1
    torch_xla.sync()
    y.backward()
    assert w.grad.tolist() == [0, 1, 2, 3] and x.tolist() == [1, 2, 3, 4]


def leaves(function):
    """The parameters that a graph leads to."""
    if hasattr(function, "variable"):
        return [function.variable]
    return [leaf for below, _ in function.next_functions if below is not None for leaf in leaves(below)]


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
        assert [held.array for held in donation_report().held] == ["f32[6,6]"] * holds
        if holds:
            (held,) = leaves(loss.grad_fn)
            assert torch.equal(held.detach().cpu(), before)


def test_the_report_shows_only_what_the_last_step_left_alone(make):
    def held():
        return [held.array for held in donation_report().held]

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


def test_a_step_closure_reads_the_value_it_was_given(make):
    seen = []
    t = make(4)
    xm.add_step_closure(lambda value: seen.append(value.tolist()), args=(t,))
    t = t + 1
    torch_xla.sync()
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
        _host.list_live_tensors()
    text = torch_xla._XLAC._get_xla_tensors_text(second)
    assert text.count("cross_replica_sum") == 2, text


def test_a_partial_sync_donates_nothing(make):
    before = steps_so_far()
    t = make(4)
    t = t + 1
    assert t.sum().item() == 10
    assert "1., 2." in str(t)
    torch_xla._XLAC._xla_sync_multi([t], [], True, True)
    assert steps_so_far() == before


def test_work_left_pending_by_a_partial_sync_keeps_its_inputs(make):
    t = make(4)
    pending, other = t * 3, t + 1
    del t
    torch_xla._XLAC._xla_sync_multi([other], [], True, True)
    torch_xla.sync()
    assert pending.tolist() == [0, 3, 6, 9] and other.tolist() == [1, 2, 3, 4]


def test_an_input_without_an_output_of_its_size_is_not_asked_for(make):
    before = steps_so_far()
    t = make(64)
    total = t.sum()
    del t
    torch_xla.sync()
    assert total.item() == 2016
    assert steps_so_far() == before


def test_no_more_inputs_are_asked_for_than_outputs_can_take(make):
    inputs = [make(7) for _ in range(4)]
    total = sum(inputs)
    del inputs
    torch_xla.sync()
    assert donated() == ["f32[7]"] and total.tolist() == [4 * i for i in range(7)]


def test_shared_constants_and_the_seed_survive(make):
    t = torch.tensor(42.0, device="xla") + 1
    torch_xla.sync()
    u = torch.tensor(42.0, device="xla") + torch.rand((), device="xla") * 0
    torch_xla.sync()
    assert t.item() == 43 and u.item() == 42
    assert torch.tensor(42.0, device="xla").item() == 42
    assert 0 <= torch.rand((), device="xla").item() < 1


def test_a_tensor_of_the_random_seed_does_not_offer_it(make):
    held = make(1, dtype=torch.int64)
    seed = torch_xla._XLAC._get_base_seed_as_tensor("xla:0")
    numbers, changed, other = torch.rand(3, device="xla"), seed + 1, held + 1
    del seed
    torch_xla._XLAC._xla_sync_live_tensors("xla:0", [], True)
    assert donated() == []
    more = torch.rand(3, device="xla")
    torch_xla.sync()
    assert len({*numbers.tolist(), *more.tolist()}) == 6
    assert other.tolist() == [1] and changed.shape == ()


def test_the_random_seed_is_no_free_input_for_advice(make):
    held = make(1, dtype=torch.int64)
    steps = []
    debug.listen(steps.append)
    try:
        numbers, other = torch.rand(3, device="xla"), held + 1
        torch_xla.sync()
    finally:
        debug.stop_listening(steps.append)
    (step,) = steps
    assert {given.array.split("]")[0]: given.use for given in step.inputs} == {"s64[": "other", "s64[1": "held"}
    assert numbers.shape == (3,) and other.tolist() == [1]


def test_memory_that_dlpack_shows_does_not_change(make):
    from torch_xla.utils.dlpack import to_dlpack

    t = make(1024)
    outside = torch.utils.dlpack.from_dlpack(to_dlpack(t))
    t = t * 2
    torch_xla.sync(wait=True)
    assert outside.tolist() == list(range(1024)) and t[5].item() == 10


def test_the_host_array_of_an_upload_does_not_change():
    host = torch.arange(4096.0)
    t = host.to("xla")
    t = t * 2
    torch_xla.sync(wait=True)
    assert donated() == ["f32[4096]"]
    assert torch.equal(host, torch.arange(4096.0)) and torch.equal(t.cpu(), 2 * host)


def test_a_tensor_that_another_thread_holds_keeps_its_value(make):
    t = make(4)
    ready, go = threading.Event(), threading.Event()

    def other(held):
        ready.set()
        go.wait()
        return held.tolist()

    with ThreadPoolExecutor(1) as worker:
        seen = worker.submit(other, t)
        ready.wait()
        try:
            t = t + 1
            torch_xla.sync(wait=True)
        finally:
            go.set()
        assert seen.result() == [0, 1, 2, 3]
    assert t.tolist() == [1, 2, 3, 4]


def test_tensors_updated_in_place_are_left_to_torch_xla(make):
    before = steps_so_far()
    t = make(4)
    place = pointer(t)
    t.add_(1)
    torch_xla.sync(wait=True)
    assert pointer(t) == place and steps_so_far() == before


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
        assert [h.holder.partition(" at ")[0] for h in report.held] == [
            f"item {number} of variable 'kept'" for number in (range(2) if holds else ())
        ]
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
    held, dead, large = make(9), make(9), make(10)
    out = held + dead + large.sum()  # the only output of 36 bytes goes to the dead one, and none is of 40
    del dead
    torch_xla.sync()
    assert donated() == ["f32[9]"] and donation_report().held == ()
    assert [len(t) for t in (held, large, out)] == [9, 10, 9]


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

    dead, marked = make(9), make(9)
    first, second = dead + marked, dead * marked
    del dead
    donate_buffer(marked)
    torch_xla.sync()
    assert sorted((donor.automatic, donor.outcome) for donor in last_step()) == [(False, "donated"), (True, "donated")]
    assert first.tolist() == [2 * i for i in range(9)] and second.tolist() == [i * i for i in range(9)]
    assert "(auto)" in str(donation_report(steps=1))
    assert {item["automatic"] for item in donation_report(steps=1).to_dict()["donors"]} == {True, False}


def test_a_wish_for_an_output_is_kept_beside_automatic_donors(make):
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
    before = steps_so_far()
    t = make(4)
    with donation_disabled():
        t = t + 1
        torch_xla.sync()
    with torch_xla_donate.debug_nans():
        t = t + 1
        torch_xla.sync()
    with auto_donate(False):
        t = t + 1
        torch_xla.sync()
        with auto_donate():
            t = t + 1
            torch_xla.sync()
            assert steps_so_far() == before + 1
        t = t + 1
        torch_xla.sync()
    assert steps_so_far() == before + 1 and t.tolist() == [5, 6, 7, 8]


def test_a_context_holds_for_its_thread_and_a_call_for_all():
    def on_another_thread():
        seen = []
        worker = threading.Thread(target=lambda: seen.append(_C.auto_donates()))
        worker.start()
        worker.join()
        return seen[0]

    assert _C.auto_donates() and not on_another_thread()
    try:
        set_auto_donate(True)
        assert on_another_thread()
        with auto_donate(False):
            assert not _C.auto_donates() and on_another_thread()
    finally:
        set_auto_donate(False)
    assert not on_another_thread()


def test_other_than_yes_or_no_is_refused():
    with pytest.raises(TypeError, match=r"enabled is of type Tensor, not a bool\..*donate_buffer"):
        set_auto_donate(torch.tensor(1))  # type: ignore[arg-type]
    assert not _C.auto_donate_is_default()


# --- Graphs ---


def test_a_dead_set_that_flips_costs_a_few_graphs_at_most():
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


@pytest.fixture
def _no_automatic_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_automatic_collection")
@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "not_waiting"])
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
            start = compiles()
    assert compiles() == start


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


def test_plans_do_not_pile_up(make):
    t = make(3)
    before = _C.sizes()
    for _ in range(50):
        t = t + 1
        torch_xla.sync()
    after = _C.sizes()
    assert after["auto_plans"] <= before["auto_plans"] + 1 and after["bases"] <= before["bases"]


# --- Settings ---


@in_process(env=SWITCHED_ON)
def test_the_environment_switches_it_on():
    t = torch.arange(4.0).to("xla")
    t = t + 1
    torch_xla.sync()
    assert [donor.automatic for donor in donation_report().donors] == [True]
    assert t.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["TORCH_XLA_DONATE_AUTO", "TORCH_XLA_DONATE_KEEP_ORDER"])
def test_a_setting_that_is_neither_yes_nor_no_is_an_error(name):
    done = run_in_child(bare.import_package, env={name: "perhaps"}, exit_code=1)
    assert f"{name}='perhaps' is neither yes nor no" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("XLA_DISABLE_FUNCTIONALIZATION", "1", "functionalization is off (XLA_DISABLE_FUNCTIONALIZATION=1)"),
        ("XLA_ENABLE_PARAM_ALIASING", "0", "XLA_ENABLE_PARAM_ALIASING=0 makes torch_xla ignore every donor"),
        ("XLA_STABLEHLO_COMPILE", "1", "XLA_STABLEHLO_COMPILE=1 makes torch_xla ignore every donor"),
    ],
)
@in_process(env=lambda name, value: {**SWITCHED_ON, name: value})
def test_the_report_says_where_liveness_is_unknown(name, value, reason):
    t = torch.arange(4.0).to("xla")
    for _ in range(2):
        t = t + 1
        torch_xla.sync()
    assert t.tolist() == [2, 3, 4, 5]
    report = donation_report()
    assert report.donors == ()
    assert f"auto_donate skipped 2 steps: {reason}" in str(report)


@in_process(env=SWITCHED_ON)
def test_nothing_is_donated_where_torch_keeps_the_nodes():
    torch._C._lazy._set_reuse_ir(True)
    t = torch.arange(4.0).to("xla")
    t = t + 1
    torch_xla.sync()
    assert t.tolist() == [1, 2, 3, 4]
    assert donation_report().donors == ()
    assert "auto_donate skipped 1 step: torch keeps nodes for later graphs (torch_lazy_reuse_ir)" in str(
        donation_report()
    )


@in_process(env=SWITCHED_ON)
def test_a_step_that_does_not_compile_leaves_nothing_behind():
    t = torch.arange(8.0).to("xla")
    broken = stablehlo_custom_call((t,), "no_such_target", [[8]], [torch.float32])
    del t
    with pytest.raises(Exception, match="custom.call|no_such_target"):
        torch_xla.sync()
    del broken
    u = torch.arange(4.0).to("xla")
    u = u + 1
    torch_xla.sync(wait=True)
    assert u.tolist() == [1, 2, 3, 4]
    assert [(donor.outcome, donor.reason) for donor in donation_report().donors] == [
        ("unusable", "the step failed: it did not compile"),
        ("donated", ""),
    ]
    assert _C.sizes()["consumed"] == 0


@lru_cache
def mesh():
    xr.use_spmd()
    return xs.Mesh(np.arange(4), (4,), ("x",))


def sharded(t, spec):
    xs.mark_sharding(t, mesh(), spec)
    return t


@in_process(env=SWITCHED_ON, devices=4)
def test_sharded_tensors_are_donated():
    mesh()
    p, g = torch.arange(32.0).reshape(8, 4).to("xla"), torch.ones(8, 4).to("xla")
    for t in (p, g):
        sharded(t, ("x", None))
    torch_xla.sync(wait=True)
    for _ in range(3):
        p = p - 0.5 * g
        torch_xla.sync(wait=True)
    assert [(donor.automatic, donor.outcome) for donor in donation_report().donors] == [(True, "donated")] * 3
    assert torch.equal(p.cpu(), torch.arange(32.0).reshape(8, 4) - 1.5)


def launch_loops():
    torch_xla.launch(loops_with_and_without_donation)


@pytest.mark.parametrize("devices", ["2", "3"])
def test_each_device_of_a_process_has_donors_of_its_own(devices):
    """Threads that step at the same time, each with its loop, its kept tensors, and a cache that stays in place."""
    done = run_in_child(launch_loops, env={"CPU_NUM_DEVICES": devices})
    assert sorted(done.stdout.splitlines()) == [f"{rank} 1" for rank in range(int(devices))]


@in_process(env={"CPU_NUM_DEVICES": "2"})
def test_a_thread_donates_while_another_still_checks_the_host():
    verify, checking, stepped = _host.verify_layouts, threading.Event(), threading.Event()

    def slow_verify():
        _host.verify_layouts = verify
        verify()
        checking.set()
        stepped.wait()

    def rank_main(rank):
        if rank == 0:
            _host.verify_layouts = slow_verify
        else:
            checking.wait()
        p = torch.arange(4.0).to("xla")
        torch_xla.sync(wait=True)
        place = pointer(p)
        with auto_donate():
            for _ in range(3):
                p = p + 1
                torch_xla.sync(wait=True)
        assert [donor.device for donor in donation_report().donors] == ["CPU:1"] * 3 + ["CPU:0"] * 3 * (rank == 0)
        assert pointer(p) == place
        stepped.set()

    ranks.launch(rank_main)


def made():
    mesh()
    t = sharded(torch.ones(8, 4).to("xla"), ("x", None))
    torch_xla.sync(wait=True)
    return t


def useless():
    """A graph that cannot use its donor, as the output is whole on each device."""
    q = sharded(made() * 2, (None, None))
    torch_xla.sync(wait=True)
    return q


@in_process(env=SWITCHED_ON, devices=4)
def test_an_automatic_donor_of_no_use_makes_no_report_worse():
    _q = useless()
    report = donation_report()
    assert [(d.automatic, d.outcome) for d in report.donors] == [(True, "unusable")]
    assert not report and report.offered == () and report.reused_fraction == 0.0
    assert "0 of 0 donors donated, 0 B (0.0% of the bytes offered); 1 automatic not used" in str(report)

    p = made()
    donate_buffer(p)
    p = p + 1
    torch_xla.sync(wait=True)
    report = donation_report()
    assert [(d.automatic, d.outcome) for d in report.donors] == [(True, "unusable"), (False, "donated")]
    assert report and report.reused_fraction == 1.0 and len(report.offered) == 1
    assert "1 of 1 donors donated, 128 B (100.0% of the bytes offered); 1 automatic not used" in str(report)


@in_process(env=SWITCHED_ON, devices=4)
def test_a_graph_offers_only_once_what_its_sharding_rules_out():
    counts = []
    for _ in range(5):
        useless()
        counts.append((compiles(), len(donation_report().donors)))
    assert len(donation_report().donors) == 1
    # The graph with its donor, and without.
    assert counts[1][0] == counts[0][0] + 1 and counts[-1] == counts[1]

    # The bound is one for each graph: another one of the same arrays has its donors.
    p = made()
    for _ in range(3):
        p = sharded(p * 3, ("x", None))
        torch_xla.sync(wait=True)
    assert [d.outcome for d in donation_report(steps=3).donors] == ["donated"] * 3


@in_process(env=SWITCHED_ON, devices=4)
def test_of_two_inputs_the_one_that_sharding_lets_through_wins():
    """It is donated from the second step on."""

    def step():
        a, b = made(), sharded(torch.ones(8, 4).to("xla"), (None, None))
        torch_xla.sync(wait=True)
        out = sharded(a + b, (None, None))
        del a, b
        torch_xla.sync(wait=True)
        return out

    for _ in range(3):
        out = step()
    assert [d.outcome for d in donation_report().donors] == ["unusable", "donated", "donated"]
    assert out.tolist() == [[2.0] * 4] * 8


# --- What other parts rely on ---


def test_donors_of_a_step_are_told_apart_whoever_has_marked_them(make):
    for marked in (0, 1):
        pair = [make(5), make(5)]
        donate_buffer(pair[marked])
        # The same graph, and the same donors; one of them marked.
        pair = [pair[0] * 2, pair[1] * 3]
        torch_xla.sync(wait=True)
        assert sorted(donor.automatic for donor in last_step()) == [False, True]
        assert all(donor.outcome == "donated" for donor in last_step())


@in_process
def test_an_error_while_the_first_step_is_prepared_is_raised():
    """As by the handler of a signal. The next step prepares again."""

    def too_slow(number, frame):
        raise TimeoutError("too slow")

    handle_signal(SIGALRM, too_slow)
    # A program in the background of a shell ignores SIGINT, and so do the processes that it starts.
    handle_signal(SIGINT, default_int_handler)
    raised, count = [SIGALRM, SIGINT], _host.process_count

    def count_slowly():
        if raised:
            # To this thread, so that Python runs the handler before the next line.
            raise_signal(raised.pop())
        return count()

    _host.process_count = count_slowly
    set_auto_donate(True)
    p = torch.ones(4, 4).to("xla") * 2
    for error in (KeyboardInterrupt, TimeoutError):
        with pytest.raises(error):
            torch_xla.sync()
    for _ in range(3):
        p = p * 2
        torch_xla.sync()
    report = donation_report()
    assert [donor.outcome for donor in report.donors] == ["donated"] * len(report.donors)
    assert len(report.donors) == 3 and report.auto_refusals == {}
    assert p[0].tolist() == [16.0] * 4


@in_process(env={"CPU_NUM_DEVICES": "2"})
def test_a_step_leaves_the_collectives_of_other_devices():
    """The report names the step's device."""

    def in_a_row(device):
        # How many collectives the next one would wait for, and itself.
        one = [torch.ones(4, 3).to(device) * 2]
        torch_xla._XLAC._xla_all_reduce_inplace("sum", one, 1.0, [[0], [1]], True)
        return torch_xla._XLAC._get_xla_tensors_text(one).count("cross_replica_sum")

    set_auto_donate(True)
    for device, other, name in (("xla:0", "xla:1", "CPU:0"), ("xla:1", "xla:0", "CPU:1")):
        p = torch.ones(4, 3).to(device)
        torch_xla._XLAC._xla_step_marker(device, [], True)
        assert (in_a_row(device), in_a_row(other)) == (1, 1)
        p = p + 1
        torch_xla._XLAC._xla_step_marker(device, [], True)
        assert (in_a_row(device), in_a_row(other)) == (1, 2)
        (donor,) = donation_report(steps=1).donors
        assert (donor.device, donor.outcome) == (name, "donated")
        assert p.tolist() == [[2.0] * 3] * 4
        for either in (device, other):
            torch_xla._XLAC._set_all_reduce_token(either, None)


def test_a_call_that_is_never_entered_warns_of_its_line():
    with pytest.warns(DonationWarning, match=r"no effect without `with`.* Call set_auto_donate\(True\)") as caught:
        auto_donate()
    assert (caught[0].filename, caught[0].lineno) == (__file__, sys._getframe().f_lineno - 1)
    assert not _C.auto_donate_is_default()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.ExitStack() as stack:
            stack.enter_context(auto_donate(False))
        auto_donate()(lambda: None)()


def test_a_decorated_function_donates(make):
    @auto_donate()
    def step(p):
        p = p * 2
        torch_xla.sync(wait=True)
        return p, _C.auto_donates()

    with auto_donate(False):
        p, inside = step(make(4, 4) + 0)
        assert inside and not _C.auto_donates()
    assert p[0].tolist() == [0.0, 2.0, 4.0, 6.0]


@in_process(env={"CPU_NUM_DEVICES": "2"})
def test_the_donors_of_a_device_do_not_depend_on_other_devices():
    """A graph has at most six sets of donors. Here another device has met four, before this one begins."""
    first_done = threading.Event()

    def donors_of(device, dead_sets):
        counts = []
        for dead in dead_sets:
            tensors = [torch.full((3,), float(i)).to("xla") for i in range(6)]
            torch_xla.sync(wait=True)
            kept = [t for i, t in enumerate(tensors) if i not in dead]
            tensors = [t + 1 for t in tensors]
            torch_xla.sync(wait=True)
            counts.append(sum(donor.device == device for donor in donation_report(steps=1).donors))
            del kept, tensors
        return counts

    def rank_main(rank):
        with auto_donate():
            if rank == 0:
                assert donors_of("CPU:0", [(0, 1), (2, 3), (4, 5), (0, 2)]) == [2] * 4
                first_done.set()
            else:
                first_done.wait()
                assert donors_of("CPU:1", [(1, 3, 5), (3, 4, 5)]) == [3, 3]

    ranks.launch(rank_main)


@in_process(env={"CPU_NUM_DEVICES": "2"})
def test_a_mark_on_a_device_changes_no_graph_of_another():
    ready, begun, marked, ended = (threading.Event() for _ in range(4))

    def new_graphs():
        """Of a step that has an old value, which a step with donors would not compute."""
        x = torch.zeros(5, 4).to("xla")
        torch_xla.sync(wait=True)
        x = x + 1
        alias = x.detach()
        alias.add_(1)
        alias.mul_(2)
        before = compiles()
        torch_xla.sync(wait=True)
        return compiles() - before

    def rank_main(rank):
        if rank == 1:
            p = torch.ones(4).to("xla")
            torch_xla.sync(wait=True)
            donate_buffer(p)
            q = p + 1
            torch_xla.sync(wait=True)
            ready.set()
            begun.wait()
            donate_buffer(q)
            marked.set()
            ended.wait()
        else:
            ready.wait()
            assert [new_graphs(), new_graphs()] == [1, 0]
            begun.set()
            marked.wait()
            assert [new_graphs(), new_graphs()] == [0, 0]
            ended.set()

    ranks.launch(rank_main)


def test_the_random_seed_is_never_donated(make):
    """Its buffer has 8 bytes and no note of torch_xla. This sync does not give it a new one at its end."""
    kept = make(2)
    for _ in range(2):
        noise = torch.rand(2, device="xla") + kept
        count = (kept.sum() + 3).to(torch.int64)
        with auto_donate():
            torch_xla._XLAC._xla_sync_live_tensors(str(kept.device), [], True)
        assert count.item() == 4 and (noise.cpu() >= kept.cpu()).all()
    assert torch.rand(2, device="xla").cpu().shape == (2,)
