"""Tensors that are written through views, in separate processes: their graphs, other processes, and signals."""

from __future__ import annotations

import functools
import gc
import signal
import threading

import pytest
import torch
import torch_xla
from children import in_process, run_in_child
from helpers import consume, pointer
from interrupts import with_pending

from torch_xla_donate import DonatedBufferError, donate_buffer, donation_report, hlo


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


def test_the_graphs_of_two_processes_are_equal(tmp_path):
    """Other processes run the same program, however fast they are and whatever garbage they have."""
    found = []
    for garbage, pause in ((0, 0.0), (5000, 0.02)):
        folder = tmp_path / str(garbage)
        run_in_child(
            write_with_pauses, garbage, pause, env={"TORCH_XLA_DONATE_AUTO": "1", "WORLD_SIZE": "2"}, dump=folder
        )
        found.append([path.read_text() for path in sorted(folder.glob("*before_optimizations.txt"))])
    assert found[0] == found[1]
    assert sum("buffer_donor" in text for text in found[0]) == 5


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
        assert [donor.outcome for donor in donation_report(steps=1).donors] == ["donated"] * 3
        assert {pointer(c) for c in new} == places, i
        caches = new
    assert all(torch.equal(c.cpu(), value) for c, value in zip(caches, expected))
    steps = [module for module in hlo.read_dump(dump_folder) if module.donors]
    assert steps and all(len(module.aliases) == 3 for module in steps)
    # Nothing is an output but the new caches.
    assert all(len(module.before.results) == 3 for module in steps)


@in_process
def test_what_a_handler_raises_meanwhile_reaches_the_program():
    cache, other = torch.zeros(4, 4).to("xla"), torch.zeros(3).to("xla")
    torch_xla.sync(wait=True)
    view, result = consume(cache, lambda cache: (cache[:2], cache * 2), wait=True)
    with pytest.raises(DonatedBufferError):
        view.fill_(3)
    donate_buffer(other)
    new = other + 1
    # The step finds the cache. The text of its error is Python's.
    step = functools.partial(torch_xla._XLAC._xla_step_marker, "xla:0", [], True)
    assert with_pending(signal.SIGINT, step) is KeyboardInterrupt
    torch_xla.sync(wait=True)
    assert new.tolist() == [1, 1, 1] and result.tolist() == [[0] * 4] * 4
    with pytest.raises(DonatedBufferError):
        other + 1
