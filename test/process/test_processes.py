"""Several processes and threads: torch_xla.launch, torchrun, and the threads of MpDeviceLoader."""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import threading

import pytest
import ranks
import torch
import torch_xla
import torch_xla.distributed.parallel_loader as parallel_loader
from children import in_process, run_in_child
from helpers import BACKENDS, consume, error_of, lose, make, pointer

from torch_xla_donate import _C, DonationError, compile, donate_buffer, donation_report, hlo, is_donated
from torch_xla_donate._report import notices

# On CPU torch_xla.launch starts one process, which has a thread for each of CPU_NUM_DEVICES devices.
TWO_DEVICES = {"CPU_NUM_DEVICES": "2"}


@pytest.mark.parametrize(
    ("options", "devices"),
    [({}, 2), ({"start_method": "fork"}, 2), ({"debug_single_process": True}, 1)],
    ids=["spawn", "fork", "debug"],
)
def test_every_device_of_a_launch_donates_its_own_buffers(tmp_path, options, devices):
    env = {"CPU_NUM_DEVICES": str(devices)}
    child = run_in_child(torch_xla.launch, ranks.donate_own_buffers, kwargs=options, env=env, dump=tmp_path)
    found = sorted(json.loads(line) for line in child.stdout.splitlines())
    assert [rank for rank, _, _ in found] == list(range(devices))
    assert len({process for _, process, _ in found}) == 1  # on CPU; a thread for each device
    assert len({thread for _, _, thread in found}) == devices
    steps = [module for module in hlo.read_dump(tmp_path) if module.before is not None and module.before.donors]
    assert len(steps) == devices
    for step in steps:
        assert len(step.after.aliases) == len(step.before.donors) == 1


def test_each_process_of_torchrun_donates_its_own_buffers():
    output = run_in_child(torchrun, ranks.__file__).stdout
    results = sorted(json.loads(line) for line in output.splitlines())
    assert [(rank, values) for rank, _, values in results] == [(0, [0.0, 8.0]), (1, [8.0, 8.0])]
    assert results[0][1] != results[1][1]


def torchrun(path: str) -> None:
    sys.argv = ["torchrun", "--standalone", "--nproc-per-node", "2", path]
    runpy.run_module("torch.distributed.run", run_name="__main__")


# --- Threads of a launch, in a process that is forked from the test's child ---


@in_process(env=TWO_DEVICES)
def test_compiled_functions_donate_on_every_device_of_a_launch():
    together, turns = threading.Barrier(2), threading.Lock()

    def rank_main(rank):
        for options in BACKENDS.values():
            # torch.compile itself refuses to compile on two threads at once: "symbolically trace".
            compiling = turns if "backend" in options else contextlib.nullcontext()
            step = compile(lambda x: x + 1, donate_argnums=0, **options)
            for size in (4, 5, 6):  # each has a separate graph
                x = ranks.make(*[float(rank)] * size)
                first = pointer(x)
                together.wait()  # so that both compile at once
                with compiling:
                    old, x = x, step(x)
                together.wait()  # torch.compile also refuses to run a function while another thread traces one
                for _ in range(3):
                    old, x = x, step(x)
                    assert is_donated(old), options
                assert pointer(x) == first
                assert x.tolist() == [rank + 4.0] * size

    ranks.launch(rank_main)


@in_process(env=TWO_DEVICES)
def test_a_trace_on_one_device_leaves_other_devices_alone():
    # torch_xla's switch against executions, its count of reads, and torch's random generator are of the whole process.
    started, stepped = threading.Event(), threading.Event()

    def rank_main(rank):
        x, marked = ranks.make(1.0, 2.0), ranks.make(3.0)
        if rank == 0:
            donate_buffer(marked)

            def f(x):
                y = x * 2
                started.set()
                stepped.wait()
                return y + 1

            step = compile(f, donate_argnums=0, pure=True)
            assert step(x).tolist() == [3, 5] and is_donated(x)
            # The steps on the other device have left the mark.
            assert _C.sizes()["pending"] == 1 and not is_donated(marked)
            out = marked + 1
            torch_xla.sync()
            assert is_donated(marked) and out.tolist() == [4]
        else:
            started.wait()
            for _ in range(3):
                x = consume(x, lambda x: x * 3)
            assert x.tolist() == [27, 54]
            torch.rand(3)
            stepped.set()

    ranks.launch(rank_main)


@in_process(env=TWO_DEVICES)
def test_reads_of_a_traced_function_are_refused_on_every_device():
    def rank_main(rank):
        x = ranks.make(1.0, 2.0)
        for f in (lambda x: x * x.sum().item(), lambda x: x[x.nonzero()], lambda x: x + torch.rand(2).to("xla")):
            step = compile(f, donate_argnums=0, pure=True)
            with pytest.raises(DonationError, match="is declared pure"):
                step(x)
        assert x.tolist() == [1, 2] and not is_donated(x)

    ranks.launch(rank_main)


@in_process(env=TWO_DEVICES)
def test_a_strict_donation_raises_in_the_thread_that_made_it():
    """Also if it is postponed."""
    postponed, other = threading.Event(), threading.Event()

    def unusable_step(rank):
        lose(ranks.make(*[1.0] * (3 + rank)), strict=True)

    def raises_of_its_own(rank, call, *arguments):
        error = error_of(DonationError, call, *arguments)
        assert f"f32[{3 + rank}]" in error and f"f32[{4 - rank}]" not in error

    def rank_main(rank):
        for _ in range(10):
            raises_of_its_own(rank, unusable_step, rank)
        if rank == 0:
            with notices.postpone_notices():
                unusable_step(rank)
            postponed.set()
            other.wait()
            raises_of_its_own(rank, notices.warn_or_raise)
        else:
            postponed.wait()
            raises_of_its_own(rank, unusable_step, rank)
            other.set()

    ranks.launch(rank_main)


# --- MpDeviceLoader ---


def loader(data, **options):
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=None)
    return parallel_loader.MpDeviceLoader(batches, torch_xla.device(), **options)


@in_process
def test_the_loaders_next_step_honours_a_mark_made_before_it(dump_folder):
    """And leaves a mark that it does not read."""
    weight, idle = torch.zeros(4).to("xla"), make(2)
    donate_buffer(idle)
    first, seen = pointer(weight), []
    for (batch,) in loader(torch.arange(16.0).reshape(4, 4)):
        if seen:
            assert is_donated(seen[-1])
        assert pointer(weight) == first
        seen.append(weight)
        donate_buffer(weight)
        weight = weight + batch
    assert is_donated(seen[-1])  # the loader steps once more when it finds that it is empty
    assert weight.tolist() == [24, 28, 32, 36] and pointer(weight) == first
    assert [mark.array for mark in donation_report().pending] == ["f32[2]"] and not is_donated(idle)
    assert donation_report() and len(donation_report().donors) == 4
    (step,) = [module for module in hlo.read_dump(dump_folder) if module.before.donors]
    assert len(step.after.aliases) == 1


@pytest.mark.parametrize("pure", [False, True])
def test_donated_batches_leave_the_data_set_as_it_was(pure):
    data = torch.arange(4 * 4096.0).reshape(4, 4096)
    expected = data.clone()
    step = compile(lambda batch: batch * 2, donate_argnums=0, pure=pure)
    for number, (batch,) in enumerate(loader(data)):
        where = pointer(batch)
        doubled = step(batch)
        assert is_donated(batch)
        assert pointer(doubled) == where
        assert torch.equal(doubled.cpu(), expected[number] * 2)
    assert torch.equal(data, expected)


@in_process
def test_random_numbers_of_a_loader_are_not_of_the_function():
    started, drawn = threading.Event(), threading.Event()

    class Augmented(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.rand(4)
            started.wait()
            second = torch.rand(4)
            drawn.set()
            yield second

    def f(x):
        y = x.exp()
        started.set()
        drawn.wait()
        return y * 2

    def batches():
        torch.manual_seed(7)
        return torch.utils.data.DataLoader(Augmented(), batch_size=None, generator=torch.Generator())

    started.set()
    expected = list(batches())
    started.clear(), drawn.clear()
    step = compile(f, donate_argnums=0, pure=True)
    # One at a time: else the first batch waits for the second.
    on_device = parallel_loader.MpDeviceLoader(batches(), torch_xla.device(), device_prefetch_size=1)
    for batch, wanted in zip(on_device, expected):
        out = step(batch)
        assert is_donated(batch)
        assert torch.allclose(out.cpu(), wanted.exp() * 2)
