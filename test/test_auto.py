"""auto_donate: what is donated by liveness, and what is not."""

from __future__ import annotations

import copy
import gc
import queue
import threading
import weakref

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from helpers import dump_env, pointer, run_script

import torch_xla_donate
from torch_xla_donate import _C, _host, auto_donate, donate_buffer, donation_disabled, donation_report, hlo


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


def test_an_input_that_nobody_holds_gives_its_memory_to_the_output(make):
    p, g = make(8, 4), make(8, 4)
    place = pointer(p)
    p = p - 0.5 * g
    torch_xla.sync()
    assert pointer(p) == place
    assert donated() == ["f32[8,4]"]
    assert torch.equal(p.cpu(), torch.arange(32.0).reshape(8, 4) * 0.5)


def test_the_hlo_of_the_step_has_the_donor_before_and_the_alias_after(tmp_path):
    run_script(
        """
        import torch, torch_xla
        p = torch.ones(8, 4).to("xla")
        g = torch.ones(8, 4).to("xla")
        torch_xla.sync(wait=True)
        import torch_xla_donate
        p = p - 0.5 * g
        torch_xla.sync(wait=True)
        """,
        env={"TORCH_XLA_DONATE_AUTO": "1", **dump_env(tmp_path)},
    )
    modules = [m for m in hlo.read_dump(tmp_path) if m.before is not None and m.before.donors]
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


def test_a_cache_that_is_written_by_slice_assignment_stays_where_it_is(make):
    cache, key = make(6, 4), make(4)
    places = []
    for i in range(6):
        cache[i] = key + i
        torch_xla.sync(wait=True)
        places.append(pointer(cache))
    # The first step finds out that the tensor keeps its old value without a need.
    assert len(set(places[1:])) == 1
    assert cache.tolist() == [[i + k for k in range(4)] for i in range(6)]


def test_caches_that_nobody_reads_in_between_are_written_in_place_too(make):
    caches, key = [make(5, 4), make(5, 4)], make(4)
    before = steps_so_far()
    for i in range(5):
        for cache in caches:
            cache[i] = key + i
        torch_xla.sync(wait=True)
    assert steps_so_far() == before + 4 and donated() == ["f32[5,4]"] * 2
    assert all(cache.tolist() == [[i + k for k in range(4)] for i in range(5)] for cache in caches)


def test_each_new_cache_is_written_in_place_from_its_second_write_on():
    """As a server makes one for each request, which writes other positions in turn, each a graph of its own."""
    run_script(
        """
        import torch, torch_xla, torch_xla_donate
        import torch_xla.debug.metrics as metrics

        def request(number):
            keys, values = torch.zeros(2, 8, 4).to("xla"), torch.zeros(2, 8, 4).to("xla")
            torch_xla.sync(wait=True)
            places = []
            for i in range(6):
                keys[:, i] = key * (i + number)
                values[:, i] = key * (i - number)
                torch_xla.sync(wait=True)
                places.append(tuple(torch_xla._XLAC._unsafe_buffer_pointer(t) for t in (keys, values)))
            assert keys[:, :6, 0].tolist() == [[i + number for i in range(6)]] * 2
            assert values[:, :6, 0].tolist() == [[i - number for i in range(6)]] * 2
            return len(set(places)) == 1

        key = torch.ones(2, 4).to("xla")
        torch_xla.sync(wait=True)
        in_place = [request(number) for number in range(30)]
        # Where there was no time for a search, or the garbage collector has just been there, it takes a write more.
        assert sum(in_place) >= 27, in_place
        compiled = metrics.metric_data("CompileTime")[0]
        assert all(donor.outcome == "donated" for donor in torch_xla_donate.donation_report().donors)
        assert compiled < 30, compiled
        """,
        env={"TORCH_XLA_DONATE_AUTO": "1"},
    )


def test_an_input_that_is_held_for_good_is_searched_for_ever_more_seldom(make, monkeypatch):
    searched, look = [], gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda generation=None: searched.append(generation) or look(generation))
    p = make(13)
    for _ in range(300):
        before = p
        p = p + 1
        torch_xla.sync()
    assert before.tolist() == [299 + k for k in range(13)] and p.tolist() == [300 + k for k in range(13)]
    # The young ones once; all of them after the 1st, 3rd, 8th, 25th and 90th step, where there is time for it.
    assert searched.count(0) == searched.count(1) == 1 and searched.count(None) <= 5


def test_one_process_of_many_searches_after_numbers_of_steps_alone():
    # Others run the same program, and must come to the same graphs, however fast they are.
    script = """
        import gc, sys, time
        import torch, torch_xla, torch_xla_donate

        searched, look = [], gc.get_objects
        gc.get_objects = lambda generation=None: searched.append((step, generation)) or look(generation)
        key, caches, step = torch.ones(4).to("xla"), [], 0
        torch_xla.sync(wait=True)
        for request in range(4):
            cache = torch.zeros(5, 4).to("xla")
            torch_xla.sync(wait=True)
            for i in range(5):
                step += 1
                cache[i] = key * i
                torch_xla.sync(wait=True)
                time.sleep(float(sys.argv[1]))
            assert cache[:, 0].tolist() == [0, 1, 2, 3, 4]
        print(searched)
    """
    env = {"TORCH_XLA_DONATE_AUTO": "1", "WORLD_SIZE": "2"}
    fast, slow = (run_script(script, pause, env=env).stdout for pause in ("0", "0.05"))
    assert fast == slow and "None" in fast
    assert "(1, 0)" not in fast and "(1, None)" in fast
    # By itself a process looks among the young objects first.
    assert run_script(script, "0", env={**env, "WORLD_SIZE": "1"}).stdout.startswith("[(1, 0)")


def test_a_view_of_a_cache_that_was_just_written_is_of_the_new_value(make):
    cache, key = make(4, 4), make(4)
    for i in range(4):
        cache[i] = key + i
        torch_xla.sync()
        view = cache[: i + 1]  # taken, and used in a later step
        torch_xla.sync()
        assert view.tolist() == [[j + k for k in range(4)] for j in range(i + 1)]


def test_a_cache_that_is_dropped_is_gone_at_the_next_step(make):
    cache, key = make(4, 4), make(4)
    for i in range(3):
        cache[i] = key
        torch_xla.sync()
    assert _C.sizes()["outdated"] > 0
    del cache
    torch_xla.sync()
    assert _C.sizes()["outdated"] == 0


def test_a_cache_that_is_known_may_be_swapped_copied_and_given_other_data(make):
    key = make(4)

    def write(cache, i):
        cache[i] = key + i
        torch_xla.sync(wait=True)

    def known():
        cache = make(5, 4) * 0
        for i in range(2):
            write(cache, i)
        _C.search_outdated()
        assert _C.sizes()["outdated"] == 1
        return cache

    rows = [[float(j + k) for k in range(4)] for j in range(5)]
    nothing = [0.0] * 4
    cache, other = known(), make(5, 4)
    torch.utils.swap_tensors(cache, other)
    for i in (2, 3):
        write(other, i)
    assert other.tolist() == [*rows[:4], nothing] and cache.tolist() == torch.arange(20.0).reshape(5, 4).tolist()
    del cache, other
    assert _C.sizes()["outdated"] == 0

    cache = known()
    copies = [cache.detach(), copy.deepcopy(cache), torch.nn.Parameter(cache, requires_grad=False), cache[:]]
    for i in (2, 3):
        write(cache, i)
    # The deep copy has memory of its own.
    assert [one.tolist() for one in copies] == [
        [*rows[: 2 if i == 1 else 4], *[nothing] * (3 if i == 1 else 1)] for i in range(4)
    ]
    cache.data = make(5, 4)
    for i in (0, 1):
        write(cache, i)
    assert cache.tolist() == [*rows[:2], *torch.arange(20.0).reshape(5, 4)[2:].tolist()]
    del cache, copies
    assert _C.sizes()["outdated"] == 0


def test_caches_that_end_on_another_thread_while_steps_look_at_them(make):
    key, caches = make(4), queue.SimpleQueue()

    def drop():
        while caches.get() is not None:
            pass

    thread = threading.Thread(target=drop)
    thread.start()
    known = 0
    try:
        for _ in range(60):
            cache = make(3, 4)
            for i in range(3):
                cache[i] = key * i
                torch_xla.sync()
                _C.search_outdated(0)
            assert cache.tolist() == [[k * i for k in range(4)] for i in range(3)]
            known += _C.sizes()["outdated"]
            caches.put(cache)
            del cache
    finally:
        caches.put(None)
        thread.join()
    assert known > 0 and _C.sizes()["outdated"] == 0


def test_an_average_of_weights_and_a_dropped_gradient_are_donated(make):
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


def test_the_report_shows_what_the_last_step_has_left_alone_and_no_older_one(make):
    def held():
        return [held.array for held in donation_report().held]

    p = make(6)
    for leave_out in (lambda: auto_donate(False), donation_disabled):
        old, p = p, p + 1
        torch_xla.sync()
        assert held() == ["f32[6]"]
        torch_xla.sync()  # with nothing to do it is no step
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


def test_a_list_of_live_tensors_that_is_no_step_leaves_collectives_in_their_order(make):
    first, second = [make(4) + 1], [make(4) + 2]
    for reduced in (first, second):
        torch_xla._XLAC._xla_all_reduce_inplace("sum", reduced, 1.0, [[0]], True)
        donation_report(predict=True)
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


def test_work_that_a_partial_sync_leaves_pending_keeps_its_inputs(make):
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
    seen = []

    def other(held):
        ready.set()
        assert go.wait(60)
        seen.append(held.tolist())

    worker = threading.Thread(target=other, args=(t,))
    worker.start()
    assert ready.wait(60)
    t = t + 1
    torch_xla.sync(wait=True)
    go.set()
    worker.join()
    assert seen == [[0, 1, 2, 3]] and t.tolist() == [1, 2, 3, 4]


def test_tensors_updated_in_place_are_left_to_torch_xla(make):
    before = steps_so_far()
    t = make(4)
    place = pointer(t)
    t.add_(1)
    torch_xla.sync(wait=True)
    assert pointer(t) == place and steps_so_far() == before


# --- What the report says of it ---


def test_the_report_lists_what_was_held_although_an_output_could_have_taken_it(make):
    weights, kept = [make(9), make(9), make(9)], []
    for holds in (True, False, True):
        kept = weights[:2] if holds else []
        weights = [w * 2 for w in weights]
        torch_xla.sync()
        report = donation_report()
        one = ("f32[9]", 36, "CPU:0", "a live tensor")
        assert [(h.array, h.bytes, h.device, h.holder) for h in report.held] == ([one] * 2 if holds else [])
        assert donated() == ["f32[9]"] * (1 if holds else 3)
    assert str(report).endswith(
        "\nauto_donate left inputs of the last step alone, which outputs could have taken:"
        "\n  2 x f32[9] (36 B): held by a live tensor"
    )
    assert report and report.to_dict()["held"] == 2 * [
        {"array": "f32[9]", "bytes": 36, "device": "CPU:0", "holder": "a live tensor"}
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


def test_as_a_context_it_holds_for_this_thread_and_as_a_function_for_all():
    def on_another_thread():
        seen = []
        worker = threading.Thread(target=lambda: seen.append(_C.auto_donates()))
        worker.start()
        worker.join()
        return seen[0]

    assert _C.auto_donates() and not on_another_thread()
    try:
        auto_donate()
        assert on_another_thread()
        with auto_donate(False):
            assert not _C.auto_donates() and on_another_thread()
    finally:
        auto_donate(False)
    assert not on_another_thread()


def test_other_than_yes_or_no_is_refused():
    with pytest.raises(TypeError, match=r"enabled is of type Tensor, not a bool\..*donate_buffer"):
        auto_donate(torch.tensor(1))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("wait", [True, False], ids=["waiting", "not_waiting"])
def test_a_steady_loop_compiles_once_while_garbage_is_collected_at_odd_times(make, wait):
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


def test_plans_do_not_pile_up(make):
    t = make(3)
    before = _C.sizes()
    for _ in range(50):
        t = t + 1
        torch_xla.sync()
    after = _C.sizes()
    assert after["auto_plans"] <= before["auto_plans"] + 1 and after["outdated"] <= before["outdated"]


# --- Settings ---


def test_the_environment_switches_it_on():
    done = run_script(
        """
        import torch, torch_xla, torch_xla_donate
        t = torch.arange(4.0).to("xla")
        t = t + 1
        torch_xla.sync()
        print([donor.automatic for donor in torch_xla_donate.donation_report().donors], t.tolist())
        """,
        env={"TORCH_XLA_DONATE_AUTO": "1"},
    )
    assert done.stdout == "[True] [1.0, 2.0, 3.0, 4.0]\n"


def test_a_setting_that_is_neither_yes_nor_no_is_an_error():
    done = run_script("import torch_xla_donate", env={"TORCH_XLA_DONATE_AUTO": "perhaps"}, exit_code=1)
    assert "TORCH_XLA_DONATE_AUTO='perhaps' is neither yes nor no" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("XLA_DISABLE_FUNCTIONALIZATION", "1", "functionalization is off (XLA_DISABLE_FUNCTIONALIZATION=1)"),
        ("XLA_ENABLE_PARAM_ALIASING", "0", "XLA_ENABLE_PARAM_ALIASING=0 makes torch_xla ignore every donor"),
        ("XLA_STABLEHLO_COMPILE", "1", "XLA_STABLEHLO_COMPILE=1 makes torch_xla ignore every donor"),
    ],
)
def test_where_it_cannot_be_told_what_is_alive_the_report_says_so(name, value, reason):
    done = run_script(
        """
        import torch, torch_xla, torch_xla_donate
        t = torch.arange(4.0).to("xla")
        for _ in range(2):
            t = t + 1
            torch_xla.sync()
        assert t.tolist() == [2, 3, 4, 5]
        report = torch_xla_donate.donation_report()
        assert report.donors == ()
        print(report)
        """,
        env={"TORCH_XLA_DONATE_AUTO": "1", name: value},
    )
    assert f"auto_donate left 2 steps alone: {reason}" in done.stdout


def test_a_step_that_does_not_compile_leaves_nothing_behind():
    run_script(
        """
        import torch, torch_xla, torch_xla_donate
        from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call
        from torch_xla_donate import _C
        t = torch.arange(8.0).to("xla")
        broken = stablehlo_custom_call((t,), "no_such_target", [[8]], [torch.float32])
        del t
        try:
            torch_xla.sync()
        except Exception as error:
            print(type(error).__name__)
        del broken
        u = torch.arange(4.0).to("xla")
        u = u + 1
        torch_xla.sync(wait=True)
        assert u.tolist() == [1, 2, 3, 4]
        donors = torch_xla_donate.donation_report().donors
        assert [(d.outcome, d.reason) for d in donors] == [
            ("unusable", "the step failed: it did not compile"), ("donated", "")], donors
        assert _C.sizes()["consumed"] == 0
        """,
        env={"TORCH_XLA_DONATE_AUTO": "1"},
    )


def test_sharded_tensors_are_donated():
    run_script(
        """
        import numpy as np, torch, torch_xla, torch_xla_donate
        import torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
        xr.use_spmd()
        mesh = xs.Mesh(np.arange(4), (4,), ("x",))
        p, g = torch.arange(32.0).reshape(8, 4).to("xla"), torch.ones(8, 4).to("xla")
        for t in (p, g):
            xs.mark_sharding(t, mesh, ("x", None))
        torch_xla.sync(wait=True)
        for i in range(3):
            p = p - 0.5 * g
            torch_xla.sync(wait=True)
        donors = torch_xla_donate.donation_report().donors
        assert [(d.automatic, d.outcome) for d in donors] == [(True, "donated")] * 3, donors
        assert torch.equal(p.cpu(), torch.arange(32.0).reshape(8, 4) - 1.5)
        """,
        env=SHARDED,
    )


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["2", "3"])
def test_each_device_of_a_process_has_donors_of_its_own(devices):
    """Threads that step at the same time, each with its loop, its cache, and tensors that it keeps."""
    done = run_script(
        """
        import sys, torch, torch_xla
        from torch_xla_donate import auto_donate, donation_report

        def loop(rank):
            p, m, cache, kept, seen = (torch.arange(6.0) + rank).to("xla"), torch.zeros(6).to("xla"), None, [], []
            for i in range(30):
                m = 0.9 * m + p * 0.1
                p = p - 0.1 * m
                cache = torch.zeros(4, 6).to("xla") if cache is None else cache
                cache[i % 4] = p
                if i % 5 == 0:
                    kept.append(p)
                torch_xla.sync(wait=bool(i % 2))
                if i % 7 == 0:
                    seen.append(p.sum().item())
            return p.tolist(), cache.tolist(), [k.tolist() for k in kept], seen

        def main(rank):
            without = loop(rank)
            with auto_donate():
                found = loop(rank)
            assert found == without, (found, without)
            sys.stdout.write(f"{rank} {any(donor.automatic for donor in donation_report().donors)}\\n")

        if __name__ == "__main__":
            torch_xla.launch(main)
        """,
        env={"CPU_NUM_DEVICES": devices},
    )
    assert sorted(done.stdout.splitlines()) == [f"{rank} True" for rank in range(int(devices))]


SHARDED = {
    "TORCH_XLA_DONATE_AUTO": "1",
    "CPU_NUM_DEVICES": "4",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
}
# One graph that cannot use its donor, as the output is whole on each device, and one that can.
UNUSABLE = """
import numpy as np, torch, torch_xla
import torch_xla.runtime as xr, torch_xla.distributed.spmd as xs
import torch_xla.debug.metrics as metrics
from torch_xla_donate import donate_buffer, donation_report
xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("x",))

def sharded(t, spec):
    xs.mark_sharding(t, mesh, spec)
    return t

def made():
    t = sharded(torch.ones(8, 4).to("xla"), ("x", None))
    torch_xla.sync(wait=True)
    return t

def useless():
    q = sharded(made() * 2, (None, None))
    torch_xla.sync(wait=True)
    return q
"""


def test_an_automatic_donor_of_no_use_makes_no_report_worse():
    run_script(
        UNUSABLE
        + """
q = useless()
report = donation_report()
assert [(d.automatic, d.outcome) for d in report.donors] == [(True, "unusable")], report
assert not report and report.offered == () and report.reused_fraction == 0.0
assert "0 of 0 donors donated, 0 B (0.0% of the bytes offered); 1 automatic of no use" in str(report)

p = made()
donate_buffer(p)
p = p + 1
torch_xla.sync(wait=True)
report = donation_report()
assert [(d.automatic, d.outcome) for d in report.donors] == [(True, "unusable"), (False, "donated")], report
assert report and report.reused_fraction == 1.0 and len(report.offered) == 1
assert "1 of 1 donors donated, 128 B (100.0% of the bytes offered); 1 automatic of no use" in str(report)
""",
        env=SHARDED,
    )


def test_a_graph_asks_only_once_for_what_sharding_keeps_from_being_used():
    run_script(
        UNUSABLE
        + """
def compiles():
    return metrics.metric_data("CompileTime")[0]

counts = []
for _ in range(5):
    useless()
    counts.append((compiles(), len(donation_report().donors)))
assert len(donation_report().donors) == 1, donation_report()
# The graph with its donor, and without.
assert counts[1][0] == counts[0][0] + 1 and counts[-1] == counts[1], counts

# Another graph of the same arrays makes up its mind by itself.
p = made()
for _ in range(3):
    p = sharded(p * 3, ("x", None))
    torch_xla.sync(wait=True)
assert [d.outcome for d in donation_report(steps=3).donors] == ["donated"] * 3, donation_report()
""",
        env=SHARDED,
    )


def test_of_two_inputs_the_one_that_sharding_lets_through_is_donated_in_the_end():
    run_script(
        UNUSABLE
        + """
def step():
    a, b = made(), sharded(torch.ones(8, 4).to("xla"), (None, None))
    torch_xla.sync(wait=True)
    out = sharded(a + b, (None, None))
    del a, b
    torch_xla.sync(wait=True)
    return out

for _ in range(3):
    out = step()
assert [d.outcome for d in donation_report().donors] == ["unusable", "donated", "donated"], donation_report()
assert out.tolist() == [[2.0] * 4] * 8
""",
        env=SHARDED,
    )


# --- What other parts rely on ---


def test_contexts_of_two_threads_leave_the_process_as_it_was():
    first = auto_donate()
    second = auto_donate()
    with first, second:
        assert _C.auto_donates()
    assert not _C.auto_donate_is_default()
    again = auto_donate(False)
    for _ in range(2):
        with again:
            assert not _C.auto_donates()
    assert not _C.auto_donate_is_default() and _C.auto_donates()


def test_donors_of_a_step_are_told_apart_whoever_has_marked_them(make):
    for marked in (0, 1):
        pair = [make(5), make(5)]
        donate_buffer(pair[marked])
        # The same graph, and the same donors; one of them marked.
        pair = [pair[0] * 2, pair[1] * 3]
        torch_xla.sync(wait=True)
        assert sorted(donor.automatic for donor in last_step()) == [False, True]
        assert all(donor.outcome == "donated" for donor in last_step())


def test_what_is_raised_while_the_first_step_is_prepared_reaches_the_program():
    run_script(
        """
        import os, signal, sys
        import torch, torch_xla
        from torch_xla_donate import _host, auto_donate, donation_report

        def handle(number, frame):
            raise TimeoutError("too slow")

        signal.signal(signal.SIGALRM, handle)
        raised, count = [signal.SIGALRM, signal.SIGINT], _host.process_count

        def count_slowly():
            if raised:
                os.kill(os.getpid(), raised.pop())
            return count()

        _host.process_count = count_slowly
        auto_donate()
        p = torch.ones(4, 4).to("xla") * 2
        for error in (KeyboardInterrupt, TimeoutError):
            try:
                torch_xla.sync()
            except error:
                continue
            raise AssertionError(f"no {error}")
        for _ in range(3):
            p = p * 2
            torch_xla.sync()
        report = donation_report()
        assert [donor.outcome for donor in report.donors] == ["donated"] * len(report.donors), report
        assert len(report.donors) == 3 and report.auto_refusals == {}, report
        assert p[0].tolist() == [16.0] * 4
        """
    )


def test_a_step_of_one_device_leaves_the_collectives_of_another_and_the_report_names_its_device():
    run_script(
        """
        import torch, torch_xla
        from torch_xla_donate import auto_donate, donation_report

        auto_donate()

        def in_a_row(device):
            # How many collectives the next one would wait for, and itself.
            one = [torch.ones(4, 3).to(device) * 2]
            torch_xla._XLAC._xla_all_reduce_inplace("sum", one, 1.0, [[0], [1]], True)
            return torch_xla._XLAC._get_xla_tensors_text(one).count("cross_replica_sum")

        for device, other, name in (("xla:0", "xla:1", "CPU:0"), ("xla:1", "xla:0", "CPU:1")):
            p = torch.ones(4, 3).to(device)
            torch_xla._XLAC._xla_step_marker(device, [], True)
            assert (in_a_row(device), in_a_row(other)) == (1, 1)
            p = p + 1
            torch_xla._XLAC._xla_step_marker(device, [], True)
            assert (in_a_row(device), in_a_row(other)) == (1, 2)
            (donor,) = donation_report(steps=1).donors
            assert (donor.device, donor.outcome) == (name, "donated"), donor
            assert p.tolist() == [[2.0] * 3] * 4
            for either in (device, other):
                torch_xla._XLAC._set_all_reduce_token(either, None)
        """,
        env={"CPU_NUM_DEVICES": "2"},
    )
