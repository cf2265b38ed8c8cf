"""Tensors that are written through views: donated from the first write on, without outputs for their old values."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
from helpers import consume, pointer

from torch_xla_donate import _C, DonatedBufferError, auto_donate, donate_buffer, donation_report

ROWS = 6


def write_row(c, i, k):
    c[i] = k


def add_to_row(c, i, k):
    c[i] += k


def write_twice(c, i, k):
    c[i] = k
    c[i, :2] += 1


#: Writes of a key of four numbers to a cache.
WRITES = {
    "row": write_row,
    "column": lambda c, i, k: c.__setitem__((slice(None), i % 4), k[0]),
    "add to a row": add_to_row,
    "multiply a column": lambda c, i, k: c[:, i % 4].mul_(k[1]),
    "slice": lambda c, i, k: c[i : i + 1].copy_(k.unsqueeze(0)),
    "chain": lambda c, i, k: c.view(-1).__setitem__(slice(4 * i, 4 * i + 4), k),
    "view of a view": lambda c, i, k: c.view(3, 2, 4)[i // 2].__setitem__(i % 2, k),
    "transposed": lambda c, i, k: c.t().__setitem__((slice(None), i), k),
    "by index": lambda c, i, k: c[1:].index_put_((torch.tensor([i % 5], device=c.device),), k.unsqueeze(0)),
    "masked": lambda c, i, k: c[i].masked_fill_(k > 1, 3.0),
    "fill": lambda c, i, k: c[i].fill_(float(i)),
    "foreach": lambda c, i, k: torch._foreach_add_([c[i], c[(i + 1) % ROWS]], [k, k]),
    "out=": lambda c, i, k: torch.add(k, k, out=c[i]),
    "unbound": lambda c, i, k: c.unbind(0)[i].copy_(k),
    "split": lambda c, i, k: c.split(2)[i // 2].add_(k),
    "data": lambda c, i, k: c.data.__setitem__(i, k),
    "detached": lambda c, i, k: c.detach().__setitem__(i, k),
    "twice": write_twice,
}


def outcomes() -> list[tuple[int, str, str]]:
    return [(donor.step, donor.array, donor.outcome) for donor in donation_report(steps=1).donors]


@pytest.mark.parametrize("name", WRITES)
def test_a_cache_stays_where_it_is_from_the_first_write_on(make, name):
    write = WRITES[name]
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
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


def test_a_cache_that_autograd_alone_holds_is_written_in_place(make):
    """The base is held by what autograd keeps of its views, in C++."""
    cache, key = make(ROWS, 4), make(4)
    rows = [cache[i] for i in range(4)]
    torch_xla.sync(wait=True)
    del cache
    gc.collect()
    with auto_donate():
        for row in rows:
            row.copy_(key)
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


@pytest.mark.parametrize("again", [False, True], ids=["read", "written_again"])
@pytest.mark.parametrize("through", ["cache", "view", "data"])
def test_a_view_taken_after_a_write_through_another_is_up_to_date(make, again, through):
    cache, key = make(3, 4), make(4)
    views = {"cache": cache, "view": cache[:2], "data": cache.data}
    donate_buffer(cache)
    views[through][0] = key + 10
    torch_xla.sync()
    assert ("f32[3,4]", "donated") in [one[1:] for one in outcomes()]
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
    result, other = consume(t, lambda t: (t * 2, alias(t)), wait=True)
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
            # A view that is used brings the cache up to date, and torch_xla then updates it in place by itself.
            assert [one[1:] for one in outcomes()] == [("f32[4,4]", "donated")] * (i == 0)
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
                    assert ("f32[3,4]", "donated") in [one[1:] for one in outcomes()]
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
    barrier = threading.Barrier(4)

    def look(_):
        for _ in range(50):
            barrier.wait()
            views = [weight.detach(), weight.data, weight[:], weight.t()]
            assert len(views) == 4

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(look, range(4)))
    assert weight[0].tolist() == [0, 1, 2, 3]


# --- Errors ---


def test_a_refused_write_to_a_consumed_cache_stops_no_step(make):
    cache, other = make(4, 4), make(3)
    view, result = consume(cache, lambda cache: (cache[:2], cache * 2), wait=True)  # the view keeps its value
    with pytest.raises(DonatedBufferError):
        view.fill_(3)  # which would have to be written into the cache
    assert consume(other, wait=True).tolist() == [1, 2, 3] and result[1].tolist() == [8, 10, 12, 14]
    for use in (lambda: cache.cpu(), lambda: view.cpu(), lambda: cache + 1):
        with pytest.raises(DonatedBufferError):
            use()
