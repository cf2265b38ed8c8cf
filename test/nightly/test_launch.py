"""Loops on several threads of one process.

On a busy machine the threads have twice not ended within the limit of 300 seconds. The cause is not known, and
docs/loops.md says what was tried. The report of a timeout shows where each rank stands in Python. Before you believe
that a process has stopped, look at its `/proc/PID/task/*/schedstat`: a thread that still waits for a processor is slow.
"""

from __future__ import annotations

import threading

import ranks
import torch
import torch_xla
from children import in_process

from torch_xla_donate import is_donated, scan, scan_layers


@in_process(env={"CPU_NUM_DEVICES": "4"})
def test_every_thread_of_a_launch_may_scan():
    # Scans take turns; torch_xla's own scan fails in some of the threads.
    meet = threading.Barrier(4)

    def rank_main(rank):
        for count in range(3, 8):
            init, xs = ranks.make(*[float(rank)] * count), torch.ones(4, count).to(torch_xla.device())
            layers = [torch.nn.Linear(count, count).to(torch_xla.device()) for _ in range(3)]
            torch_xla.sync(wait=True)
            meet.wait()
            last, _ = scan(lambda carry, x: (carry + x, carry * 2), init, xs, donate="init")
            out = scan_layers(layers, xs)
            torch_xla.sync()
            assert last.tolist() == [rank + 4.0] * count and is_donated(init)
            for layer in layers:
                xs = layer(xs)
            assert torch.allclose(out.cpu(), xs.cpu())

    ranks.launch(rank_main)
