"""Tensors that are written through views: donated from the first write on, without outputs for their old values."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import operator
import queue
import signal
import threading
from pathlib import Path

import bare
import pytest
import ranks
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from children import in_process, run_in_child
from helpers import pointer

from torch_xla_donate import _C, DonatedBufferError, auto_donate, donate_buffer, donation_report, hlo

ROWS = 6


def write_row(c, i, k):
    c[i] = k


def write_column(c, i, k):
    c[:, i % 4] = k[0]


def add_to_row(c, i, k):
    c[i] += k


def multiply_column(c, i, k):
    c[:, i % 4].mul_(k[1])


def write_slice(c, i, k):
    c[i : i + 1].copy_(k.unsqueeze(0))


def write_narrow(c, i, k):
    c.narrow(0, i, 1).copy_(k)


def write_chain(c, i, k):
    c.view(-1)[4 * i : 4 * i + 4] = k


def write_view_of_view(c, i, k):
    c.view(3, 2, 4)[i // 2][i % 2] = k


def write_transposed(c, i, k):
    c.t()[:, i] = k


def write_by_index(c, i, k):
    c[1:].index_put_((torch.tensor([i % 5], device=c.device),), k.unsqueeze(0))


def write_masked(c, i, k):
    c[i].masked_fill_(k > 1, 3.0)


def fill(c, i, k):
    c[i].fill_(float(i))


def write_foreach(c, i, k):
    torch._foreach_add_([c[i], c[(i + 1) % ROWS]], [k, k])


def write_out(c, i, k):
    torch.add(k, k, out=c[i])


def write_unbound(c, i, k):
    c.unbind(0)[i].copy_(k)


def write_split(c, i, k):
    c.split(2)[i // 2].add_(k)


def write_data(c, i, k):
    c.data[i] = k


def write_detached(c, i, k):
    c.detach()[i] = k


def write_twice(c, i, k):
    c[i] = k
    c[i, :2] += 1


WRITES = (
    write_row, write_column, add_to_row, multiply_column, write_slice, write_narrow, write_chain, write_view_of_view,
    write_transposed, write_by_index, write_masked, fill, write_foreach, write_out, write_unbound, write_split,
    write_data, write_detached, write_twice,
)  # fmt: skip


def default_mode():
    return contextlib.nullcontext()


def compiles() -> int:
    return int(metrics.metric_data("CompileTime")[0]) if metrics.metric_data("CompileTime") else 0


def outcomes() -> list[tuple[int, str, str]]:
    return [(donor.step, donor.array, donor.outcome) for donor in donation_report(steps=1).donors]


@pytest.mark.parametrize("mode", [default_mode, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_a_cache_stays_where_it_is_from_the_first_write_on(make, write, mode):
    with mode(), auto_donate():
        cache, copy = make(ROWS, 4), torch.arange(ROWS * 4.0).reshape(ROWS, 4)
        key, steps = make(4), set()
        place = pointer(cache)
        for i in range(4):
            write(cache, i, key)
            write(copy, i, torch.arange(4.0))
            torch_xla.sync(wait=True)
            # The cache is not read in between: that would bring it up to date.
            ((step, array, outcome),) = outcomes()
            steps.add(step)
            assert (array, outcome) == (f"f32[{ROWS},4]", "donated")
        assert len(steps) == 4
        assert pointer(cache) == place
        assert torch.equal(cache.cpu(), copy)


class Attention(torch.nn.Module):
    def __init__(self, cache):
        super().__init__()
        self.register_buffer("cache", cache)

    def forward(self, i, key):
        self.cache[i] = key


def in_module(cache):
    return Attention(cache)


def in_closure(cache):
    def write(i, key):
        cache[i] = key

    return write


def in_list(cache):
    layers = [{"cache": [cache]}]

    def write(i, key):
        layers[0]["cache"][0][i] = key

    return write


def in_autograd_graph(cache):
    """The base is held by what autograd keeps of its views, in C++."""
    rows = [cache[i] for i in range(4)]
    torch_xla.sync(wait=True)

    def write(i, key):
        rows[i].copy_(key)

    return write


@pytest.mark.parametrize("hold", [in_module, in_closure, in_list])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_whatever_holds_the_cache_it_is_written_in_place(make, hold, frozen):
    cache, key = make(ROWS, 4), make(4)
    place, write = pointer(cache), hold(cache)
    if frozen:
        gc.collect()
        gc.freeze()  # permanently: gc.unfreeze() would also thaw the objects that conftest.py has frozen
    with auto_donate():
        for i in range(4):
            write(i, key + i)
            torch_xla.sync(wait=True)
            ((_, array, outcome),) = [one for one in outcomes() if one[1] != "f32[4]"]
            assert (array, outcome) == (f"f32[{ROWS},4]", "donated")
    assert pointer(cache) == place
    assert cache[:4].tolist() == [[i + k for k in range(4)] for i in range(4)]


def test_a_cache_that_autograd_alone_holds_is_written_in_place(make):
    key = make(4)
    write = in_autograd_graph(make(ROWS, 4))
    gc.collect()
    with auto_donate():
        for i in range(4):
            write(i, key)
            torch_xla.sync(wait=True)
            assert (f"f32[{ROWS},4]", "donated") in [one[1:] for one in outcomes()]


def test_a_cache_is_written_in_place_whichever_thread_writes(make):
    cache, key = make(ROWS, 4), make(4)
    place = pointer(cache)
    with auto_donate():
        for i in range(4):
            thread = threading.Thread(target=write_row, args=(cache, i, key))
            thread.start()
            thread.join()
            torch_xla.sync(wait=True)
            assert [one[1:] for one in outcomes()] == [(f"f32[{ROWS},4]", "donated")]
    assert pointer(cache) == place


@in_process(env={"CPU_NUM_DEVICES": "2"})
def test_each_device_of_a_process_writes_its_own_cache_in_place():
    torch_xla.launch(ranks.write_rows_in_place, start_method="fork")


def write_with_pauses(garbage: int, pause: float) -> None:
    kept = [[torch.zeros(1)] for _ in range(garbage)]
    key = torch.ones(4).to("xla")
    for request in range(3):
        cache = torch.zeros(5, 4).to("xla")
        torch_xla.sync(wait=True)
        for i in range(5):
            cache[i] = key * i
            torch_xla.sync(wait=True)
            threading.Event().wait(pause)
            if i == request and kept:
                gc.collect()
        assert cache[:, 0].tolist() == [0, 1, 2, 3, 4]


def before_optimizations(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*before_optimizations.txt"))]


def test_the_graphs_of_two_processes_are_equal(tmp_path):
    """Other processes run the same program, however fast they are and whatever garbage they have."""
    found = []
    for garbage, pause in ((0, 0.0), (5000, 0.02)):
        folder = tmp_path / str(garbage)
        run_in_child(
            write_with_pauses, garbage, pause, env={"TORCH_XLA_DONATE_AUTO": "1", "WORLD_SIZE": "2"}, dump=folder
        )
        found.append(before_optimizations(folder))
    assert found[0] == found[1]
    assert sum("buffer_donor" in text for text in found[0]) == 5


def test_without_donors_the_graphs_are_those_of_torch_xla_alone(tmp_path):
    found = []
    for package in (True, False):
        folder = tmp_path / str(package)
        values = run_in_child(bare.write_through_views, package, dump=folder).value
        found.append((values, before_optimizations(folder)))
    assert found[0] == found[1] and len(found[0][1]) >= 3


@in_process
def test_the_caches_of_a_beam_search_take_over_the_old_memory(dump_folder):
    """From the first step on, where the caches are written before anything has been donated."""
    caches = [torch.full((4, 6), float(j)).to("xla") for j in range(3)]
    expected = [torch.full((4, 6), float(j)) for j in range(3)]
    torch_xla.sync(wait=True)
    places = {pointer(c) for c in caches}
    for i in range(4):
        order = torch.tensor([(i + j) % 4 for j in range(4)])
        new = [c.index_select(0, order.to("xla")) for c in caches]
        for j, c in enumerate(new):
            c[:, i] = 10.0 * i + j
        expected = [c.index_select(0, order) for c in expected]
        for j, c in enumerate(expected):
            c[:, i] = 10.0 * i + j
        donate_buffer(caches)
        torch_xla.sync(wait=True)
        assert [outcome for *_, outcome in outcomes()] == ["donated"] * 3
        assert {pointer(c) for c in new} == places, i
        caches = new
    assert all(torch.equal(c.cpu(), value) for c, value in zip(caches, expected))
    steps = [module for module in hlo.read_dump(dump_folder) if module.donors]
    assert steps and all(len(module.aliases) == 3 for module in steps)
    # Nothing is an output but the new caches.
    assert all(len(module.before.results) == 3 for module in steps)


def test_marked_caches_are_written_in_place_in_inference_mode(make):
    with torch.inference_mode():
        caches, key = [make(ROWS, 4) for _ in range(2)], make(4)
        donate_buffer(make(1))
        places = {pointer(cache) for cache in caches}
        for i in range(4):
            new = [cache + 1 for cache in caches]
            for cache in new:
                cache[i] = key
            donate_buffer(caches)
            torch_xla.sync(wait=True)
            caches = new
            assert [one[2] for one in outcomes()] == ["donated"] * 2
            assert {pointer(cache) for cache in caches} == places
        assert [cache[0].tolist() for cache in caches] == [[3, 4, 5, 6]] * 2


@in_process(env={"TORCH_XLA_DONATE_AUTO": "1"})
def test_each_new_cache_is_written_in_place_and_compiles_once():
    """As a server makes one for each request, which writes other positions in turn, each with a separate graph."""

    def request(number):
        keys, values = torch.zeros(2, 8, 4).to("xla"), torch.zeros(2, 8, 4).to("xla")
        key = scale[number]
        torch_xla.sync(wait=True)
        places = [pointer(t) for t in (keys, values)]
        for i in range(6):
            keys[:, i] = key
            values[:, i] = -key
            torch_xla.sync(wait=True)
        assert places == [pointer(t) for t in (keys, values)], number
        assert keys[:, :, 0].tolist() == [[number] * 6 + [0] * 2] * 2
        assert values[:, :, 0].tolist() == [[-number] * 6 + [0] * 2] * 2

    scale = [torch.full((2, 4), float(number)).to("xla") for number in range(5)]
    torch_xla.sync(wait=True)
    compiled = []
    for number in range(5):
        request(number)
        compiled.append(compiles())
    assert len(set(compiled)) == 1, compiled
    assert all(donor.outcome == "donated" for donor in donation_report().donors)


@pytest.mark.parametrize("again", [False, True], ids=["read", "written_again"])
@pytest.mark.parametrize("through", ["cache", "view", "data"])
def test_a_view_is_the_first_use_after_a_write_through_another(make, again, through):
    cache, key = make(3, 4), make(4)
    views = {"cache": cache, "view": cache[:2], "data": cache.data}
    donate_buffer(cache)
    views[through][0] = key + 10
    torch_xla.sync()
    if again:
        views[through][1] = key + 20
        torch_xla.sync()
    row = cache[0]
    torch_xla.sync()
    assert row.tolist() == [10, 11, 12, 13]
    assert cache[1].tolist() == ([20, 21, 22, 23] if again else [4, 5, 6, 7])
    assert views[through][0].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize("alias", [lambda t: t.data, lambda t: t.detach()], ids=["data", "detach"])
def test_a_new_value_for_an_alias_revives_views_of_the_tensor(make, alias):
    t = make(4, 4)
    donate_buffer(t)
    result = t * 2
    other = alias(t)
    torch_xla.sync(wait=True)
    other.copy_(make(4, 4) + 5)
    row = t[1]
    torch_xla.sync(wait=True)
    assert row.tolist() == [9, 10, 11, 12] and t[0].tolist() == [5, 6, 7, 8] and result[0].tolist() == [0, 2, 4, 6]


def test_a_view_of_a_just_written_cache_has_the_new_value(make):
    cache, key = make(4, 4), make(4)
    with auto_donate():
        for i in range(4):
            cache[i] = key + i
            torch_xla.sync()
            view = cache[: i + 1]  # taken, and used in a later step
            torch_xla.sync()
            assert view.tolist() == [[j + k for k in range(4)] for j in range(i + 1)]


# --- The notes ---


def test_a_cache_that_is_dropped_leaves_no_note(make):
    before = _C.sizes()
    cache, key = make(4, 4), make(4)
    cache[0] = key
    assert _C.sizes()["outdated"] == before["outdated"] + 1
    with auto_donate():
        torch_xla.sync()
    assert _C.sizes()["outdated"] == before["outdated"]
    assert _C.sizes()["bases"] == before["bases"] + 1
    cache[1] = key
    del cache
    assert (_C.sizes()["outdated"], _C.sizes()["bases"]) == (before["outdated"], before["bases"])
    torch_xla.sync()


def test_a_noted_cache_may_be_swapped_copied_or_get_other_data(make):
    before, key = _C.sizes()["bases"], make(4)
    rows = [[float(j + k) for k in range(4)] for j in range(5)]
    other_rows = torch.arange(20.0).reshape(5, 4).tolist()

    def write(cache, i):
        cache[i] = key + i
        torch_xla.sync(wait=True)

    def noted():
        cache = make(5, 4)
        for i in range(2):
            write(cache, i)
        assert _C.sizes()["bases"] == before + 1
        return cache

    with auto_donate():
        cache, other = noted(), make(5, 4)
        cache[2] = key + 2
        torch.utils.swap_tensors(cache, other)
        torch_xla.sync(wait=True)
        write(other, 3)
        assert other.tolist() == [*rows[:4], other_rows[4]] and cache.tolist() == other_rows
        del cache, other
        assert _C.sizes()["bases"] == before

        cache = noted()
        copies = [cache.detach(), cache.clone(), torch.nn.Parameter(cache, requires_grad=False), cache[:]]
        for i in (2, 3):
            write(cache, i)
        # The clone has separate memory.
        assert [one.tolist() for one in copies] == [
            [*rows[: 2 if i == 1 else 4], *other_rows[2 if i == 1 else 4 :]] for i in range(4)
        ]
        cache.data = make(5, 4)
        for i in (0, 1):
            write(cache, i)
        assert cache.tolist() == [*rows[:2], *other_rows[2:]]
        del cache, copies
        assert _C.sizes()["bases"] == before


def test_caches_end_on_another_thread_while_steps_look_at_them(make):
    before, key, caches = _C.sizes()["bases"], make(4), queue.SimpleQueue()

    def drop():
        while caches.get() is not None:
            pass

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        with auto_donate():
            for _ in range(60):
                cache = make(3, 4)
                for i in range(3):
                    cache[i] = key * i
                    torch_xla.sync()
                assert cache.tolist() == [[k * i for k in range(4)] for i in range(3)]
                cache[0] = key
                caches.put(cache)
                del cache
    finally:
        caches.put(None)
        thread.join()
    assert _C.sizes()["bases"] == before and _C.sizes()["outdated"] == 0


def test_threads_may_take_views_of_one_tensor_at_once(make):
    """Each view may note its base, which is one tensor."""
    donate_buffer(make(1))  # from now on bases are noted
    weight = make(4, 4)
    barrier, errors = threading.Barrier(4), []

    def look():
        try:
            for _ in range(50):
                barrier.wait()
                views = [weight.detach(), weight.data, weight[:], weight.t()]
                assert len(views) == 4
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and weight[0].tolist() == [0, 1, 2, 3]


# --- Errors ---


def test_a_cache_whose_new_value_cannot_be_had_stops_no_step(make):
    cache, other = make(4, 4), make(3)
    donate_buffer(cache)
    view = cache[:2]  # keeps its value
    result = cache * 2
    torch_xla.sync(wait=True)
    with pytest.raises(DonatedBufferError):
        view.fill_(3)  # which would have to be written into the cache
    donate_buffer(other)
    other = other + 1
    torch_xla.sync(wait=True)
    assert other.tolist() == [1, 2, 3] and result[1].tolist() == [8, 10, 12, 14]
    for use in (lambda: cache.cpu(), lambda: view.cpu(), lambda: cache + 1):
        with pytest.raises(DonatedBufferError):
            use()


@in_process
def test_what_a_handler_raises_meanwhile_reaches_the_program():
    cache, other = torch.zeros(4, 4).to("xla"), torch.zeros(3).to("xla")
    torch_xla.sync(wait=True)
    donate_buffer(cache)
    view = cache[:2]
    result = cache * 2
    torch_xla.sync(wait=True)
    with pytest.raises(DonatedBufferError):
        view.fill_(3)
    donate_buffer(other)
    new = other + 1
    # No bytecode runs between the signal and the step, which finds the cache. The text of its error is Python's.
    send = functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGINT))
    step = functools.partial(torch_xla._XLAC._xla_step_marker, "xla:0", [], True)
    calls = map(operator.methodcaller("__call__"), [send, step])
    with pytest.raises(KeyboardInterrupt):
        collections.deque(calls, maxlen=0)
    torch_xla.sync(wait=True)
    assert new.tolist() == [1, 1, 1] and result.tolist() == [[0] * 4] * 4
    with pytest.raises(DonatedBufferError):
        other + 1
