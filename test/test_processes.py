"""Several processes and threads: torch_xla.launch, torchrun, and the threads of MpDeviceLoader."""

from __future__ import annotations

import json
import textwrap
import threading

import pytest
import torch
import torch_xla
from helpers import RAISES, dump_env, pointer, run_script

import torch_xla_donate
from torch_xla_donate import _C, donate_buffer, hlo, is_donated

pytestmark = pytest.mark.slow

# On CPU torch_xla.launch starts one process, which has a thread for each of CPU_NUM_DEVICES devices.
PRELUDE = """
import json, os, sys, threading, time, warnings
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as parallel_loader
import torch_xla_donate
from torch_xla_donate import *
from torch_xla_donate import _C

def place(t):
    xm.wait_device_ops()
    return torch_xla._XLAC._unsafe_buffer_pointer(t)

def make(*values):
    t = torch.tensor(values).to(torch_xla.device())
    torch_xla.sync(wait=True)
    return t
"""

TWO_DEVICES = {"CPU_NUM_DEVICES": "2"}


def run(body, call="", **options):
    return run_script(PRELUDE + RAISES + textwrap.dedent(body) + "\n" + textwrap.dedent(call), **options).stdout


FORK = 'torch_xla.launch(rank_main, start_method="fork")'


def launch(body, call=FORK, **options):
    return run(body, f'if __name__ == "__main__":\n    {call}\n    print("end")\n', **options)


@pytest.mark.parametrize(
    ("call", "devices"),
    [
        ("torch_xla.launch(rank_main)", 2),
        (FORK, 2),
        ("torch_xla.launch(rank_main, debug_single_process=True)", 1),
    ],
)
def test_every_device_of_a_launch_donates_its_own_buffers(tmp_path, call, devices):
    output = launch(
        """
        def rank_main(rank):
            weight = make(float(rank), 1.0, 2.0, 3.0)
            first = place(weight)
            for _ in range(5):
                donate_buffer(weight)
                updated = weight + 1
                torch_xla.sync()
                assert is_donated(weight)
                message = raises(DonatedBufferError, lambda: weight + 1)
                assert "script.py" in message, message
                weight = updated
            assert place(weight) == first
            assert weight.tolist() == [rank + 5.0, 6.0, 7.0, 8.0]
            own = str(torch_xla.device()).replace("xla", "CPU")
            donors = [donor for donor in donation_report().donors if donor.device == own]
            assert donors and all(donor.outcome == "donated" for donor in donors), donors
            sys.stdout.write(json.dumps([rank, os.getpid(), threading.get_ident()]) + chr(10))
        """,
        call,
        env={"CPU_NUM_DEVICES": str(devices), **dump_env(tmp_path)},
    )
    ranks = sorted(json.loads(line) for line in output.splitlines()[:-1])
    assert [rank for rank, _, _ in ranks] == list(range(devices))
    assert len({process for _, process, _ in ranks}) == 1  # on CPU; a thread for each device
    assert len({thread for _, _, thread in ranks}) == devices
    steps = [module for module in hlo.read_dump(tmp_path) if module.before is not None and module.before.donors]
    assert len(steps) == devices
    for step in steps:
        assert len(step.after.aliases) == len(step.before.donors) == 1


def test_every_thread_of_a_launch_may_scan():
    # torch.fx traces for one thread at a time; torch_xla's own scan fails in some of them.
    launch(
        """
        meet = threading.Barrier(4)
        def rank_main(rank):
            for count in range(3, 8):
                init, xs = make(*[float(rank)] * count), torch.ones(4, count).to(torch_xla.device())
                layers = [torch.nn.Linear(count, count).to(torch_xla.device()) for _ in range(3)]
                torch_xla.sync(wait=True)
                meet.wait(60)
                try:
                    last, _ = scan(lambda carry, x: (carry + x, carry * 2), init, xs, donate="init")
                    out = scan_layers(layers, xs)
                    torch_xla.sync()
                except BaseException:
                    meet.abort()
                    raise
                assert last.tolist() == [rank + 4.0] * count and is_donated(init)
                for layer in layers:
                    xs = layer(xs)
                assert torch.allclose(out.cpu(), xs.cpu())
        """,
        "torch_xla.launch(rank_main)",
        env={"CPU_NUM_DEVICES": "4"},
    )


def test_each_process_of_torchrun_donates_its_own_buffers(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text(
        PRELUDE
        + RAISES
        + textwrap.dedent(
            """
            def rank_main(rank):
                step = torch_xla_donate.compile(lambda state: {"w": state["w"] * 2}, donate_argnums=0)
                state = {"w": make(float(rank), 1.0)}
                first = place(state["w"])
                for _ in range(3):
                    old, state = state, step(state)
                    raises(DonatedBufferError, old["w"].cpu)
                assert place(state["w"]) == first
                print(json.dumps([rank, os.getpid(), state["w"].tolist()]), flush=True)

            torch_xla.launch(rank_main)
            """
        ),
        encoding="utf-8",
    )
    output = run_script(
        f"""
        import runpy, sys
        sys.argv = ["torchrun", "--standalone", "--nproc-per-node", "2", {str(worker)!r}]
        runpy.run_module("torch.distributed.run", run_name="__main__")
        """
    ).stdout
    results = sorted(json.loads(line) for line in output.splitlines())
    assert [(rank, values) for rank, _, values in results] == [(0, [0.0, 8.0]), (1, [8.0, 8.0])]
    assert results[0][1] != results[1][1]


def test_compiled_functions_donate_on_every_device_of_a_launch():
    output = launch(
        """
        from contextlib import nullcontext

        together, turns = threading.Barrier(2), threading.Lock()

        def rank_main(rank):
            for options in ({}, {"pure": True}, {"backend": "openxla"}):
                # torch.compile itself refuses to compile on two threads at once: "symbolically trace".
                compiling = turns if "backend" in options else nullcontext()
                step = torch_xla_donate.compile(lambda x: x + 1, donate_argnums=0, **options)
                for size in (4, 5, 6):  # each has a graph of its own
                    x = make(*[float(rank)] * size)
                    first = place(x)
                    together.wait(60)  # so that both compile at once
                    with compiling:
                        old, x = x, step(x)
                    for _ in range(3):
                        old, x = x, step(x)
                        assert is_donated(old), options
                    assert place(x) == first
                    assert x.tolist() == [rank + 4.0] * size
        """,
        env=TWO_DEVICES,
    )
    assert output == "end\n"


def test_a_trace_on_one_device_leaves_the_steps_and_reads_on_others_alone():
    # torch_xla's switch against executions, its count of reads, and torch's random generator are of the whole process.
    output = launch(
        """
        started, stepped = threading.Event(), threading.Event()

        def rank_main(rank):
            x = make(1.0, 2.0)
            if rank == 0:
                def f(x):
                    y = x * 2
                    started.set()
                    assert stepped.wait(60)
                    return y + 1
                step = torch_xla_donate.compile(f, donate_argnums=0, pure=True)
                assert step(x).tolist() == [3, 5] and is_donated(x)
            else:
                assert started.wait(60)
                try:
                    donate_buffer(x)
                    y = x * 3
                    torch_xla.sync()
                    assert is_donated(x) and y.tolist() == [3, 6]
                    torch.rand(3)
                finally:
                    stepped.set()
        """,
        env=TWO_DEVICES,
    )
    assert output == "end\n"


def test_reads_of_the_traced_function_itself_are_refused_on_every_device():
    output = launch(
        """
        def rank_main(rank):
            x = make(1.0, 2.0)
            for f in (lambda x: x * x.sum().item(), lambda x: x[x.nonzero()], lambda x: x + torch.rand(2).to("xla")):
                step = torch_xla_donate.compile(f, donate_argnums=0, pure=True)
                assert "is declared pure" in raises(DonationError, lambda: step(x))
            assert x.tolist() == [1, 2] and not is_donated(x)
        """,
        env=TWO_DEVICES,
    )
    assert output == "end\n"


def test_a_strict_donation_raises_in_the_thread_that_made_it():
    output = launch(
        """
        def rank_main(rank):
            t = make(*[1.0] * (3 + rank))
            for _ in range(10):
                donate_buffer(t, strict=True)
                total = t.sum()
                message = raises(DonationError, lambda: torch_xla.sync(wait=True))
                assert f"f32[{3 + rank}]" in message and f"f32[{4 - rank}]" not in message, (rank, message)
        """,
        env=TWO_DEVICES,
    )
    assert output == "end\n"


def test_steps_on_one_device_leave_the_marks_of_another_pending():
    output = launch(
        """
        marked, stepped = threading.Event(), threading.Event()

        def rank_main(rank):
            t = make(1.0, 2.0)
            if rank == 0:
                donate_buffer(t)
                marked.set()
                assert stepped.wait(60)
                assert _C.sizes()["pending"] == 1 and not is_donated(t)
                out = t + 1
                torch_xla.sync()
                assert is_donated(t) and out.tolist() == [2, 3]
            else:
                assert marked.wait(60)
                for _ in range(5):
                    donate_buffer(t)
                    old, t = t, t + 1
                    torch_xla.sync()
                    assert is_donated(old)
                stepped.set()
        """,
        env=TWO_DEVICES,
    )
    assert output == "end\n"


# --- MpDeviceLoader ---


def loader(data, **options):
    import torch_xla.distributed.parallel_loader as parallel_loader

    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=None)
    return parallel_loader.MpDeviceLoader(batches, torch_xla.device(), **options)


def test_a_mark_before_the_next_batch_is_honoured_by_the_loaders_own_step(tmp_path):
    output = run(
        """
data = torch.utils.data.TensorDataset(torch.arange(16.0).reshape(4, 4))
batches = torch.utils.data.DataLoader(data, batch_size=None)
weight = make(0.0, 0.0, 0.0, 0.0)
first, seen = place(weight), []
for (batch,) in parallel_loader.MpDeviceLoader(batches, torch_xla.device()):
    if seen:
        assert is_donated(seen[-1])
    assert place(weight) == first
    seen.append(weight)
    donate_buffer(weight)
    weight = weight + batch
assert is_donated(seen[-1])  # the loader steps once more when it finds that it is empty
assert weight.tolist() == [24, 28, 32, 36] and place(weight) == first
assert donation_report() and len(donation_report().donors) == 4
print("end")
""",
        env=dump_env(tmp_path),
    )
    assert output == "end\n"
    (step,) = [module for module in hlo.read_dump(tmp_path) if module.before.donors]
    assert len(step.after.aliases) == 1


@pytest.mark.parametrize("batches_per_execution", [1, 2])
def test_the_loaders_own_steps_leave_marks_pending_that_they_do_not_read(make, batches_per_execution):
    idle, total = make(2), make(4)
    donate_buffer(idle)
    for (batch,) in loader(torch.ones(4, 4), batches_per_execution=batches_per_execution):
        assert not is_donated(idle)
        assert _C.sizes()["pending"] == 1
        total = total + batch
    torch_xla.sync()
    assert (idle.tolist(), total.tolist()) == ([0, 1], [4, 5, 6, 7])
    out = idle * 2
    torch_xla.sync()
    assert is_donated(idle)
    assert out.tolist() == [0, 2]


@pytest.mark.parametrize("pure", [False, True])
def test_batches_of_a_loader_can_be_donated_and_the_data_set_keeps_its_values(pure):
    data = torch.arange(4 * 4096.0).reshape(4, 4096)
    expected = data.clone()
    step = torch_xla_donate.compile(lambda batch: batch * 2, donate_argnums=0, pure=pure)
    for number, (batch,) in enumerate(loader(data)):
        where = pointer(batch)
        doubled = step(batch)
        assert is_donated(batch)
        assert pointer(doubled) == where
        assert torch.equal(doubled.cpu(), expected[number] * 2)
    assert torch.equal(data, expected)


def test_a_loader_that_draws_random_numbers_does_not_make_a_function_impure():
    import torch_xla.distributed.parallel_loader as parallel_loader

    started, drawn = threading.Event(), threading.Event()

    class Augmented(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield torch.rand(4)
            assert started.wait(60)
            second = torch.rand(4)
            drawn.set()
            yield second

    def f(x):
        y = x.exp()
        started.set()
        assert drawn.wait(60)
        return y * 2

    def batches():
        torch.manual_seed(7)
        return torch.utils.data.DataLoader(Augmented(), batch_size=None, generator=torch.Generator())

    started.set()
    expected = list(batches())
    started.clear(), drawn.clear()
    step = torch_xla_donate.compile(f, donate_argnums=0, pure=True)
    # One at a time: else the first batch waits for the second.
    on_device = parallel_loader.MpDeviceLoader(batches(), torch_xla.device(), device_prefetch_size=1)
    for batch, wanted in zip(on_device, expected):
        out = step(batch)
        assert is_donated(batch)
        assert torch.allclose(out.cpu(), wanted.exp() * 2)
