"""scan in processes of its own: the HLO, SPMD, eager mode, and threads that wait for each other."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch_xla
from children import in_process
from helpers import lacking, needs_jax, spmd_scan_gradients
from sharding import mesh, shard
from torch_xla.experimental.scan import scan as host_scan

from torch_xla_donate import DonationError, _host, compile, donation_report, hlo, is_donated, scan, scan_layers


def sharded(*shape):
    """An array over all devices, each with a part of the rows."""
    mesh()
    t = (torch.arange(torch.Size(shape).numel()).reshape(shape) / 16).to("xla")
    shard(t, *[None] * (len(shape) - 2), "x", None)
    torch_xla.sync(wait=True)
    return t


def multiply_and_sum(carry, x):
    return carry * x + 1, carry.sum()


def aliased_bytes(dump_folder):
    modules = [found.after for found in hlo.read_dump(dump_folder) if found.after is not None]
    return [module.aliased_bytes for module in modules if module.aliases]


@pytest.mark.parametrize("pure", [False, True])
@in_process
def test_the_carry_is_aliased_to_the_final_carry_in_the_hlo(pure, dump_folder):
    def run(init, xs):
        return scan(lambda carry, x: (carry * 2 + x, carry.sum()), init, xs, donate="init")

    run = compile(run, donate_argnums=0, pure=True) if pure else run
    final, xs = torch.ones(64, 64).to("xla"), torch.ones(5, 64, 64).to("xla")
    torch_xla.sync(wait=True)
    for _ in range(2):
        final, ys = run(final, xs)
        torch_xla.sync(wait=True)
    assert final[0, 0].item() == 63 * 32 + 31 and ys.shape == (5,)
    assert aliased_bytes(dump_folder) == [64 * 64 * 4]


@in_process(devices=4)
def test_under_spmd_the_carry_is_donated_and_aliased_per_device(dump_folder):
    expected, expected_ys = host_scan(multiply_and_sum, sharded(8, 4), sharded(3, 8, 4))
    torch_xla.sync(wait=True)
    init = sharded(8, 4)
    final, ys = scan(multiply_and_sum, init, sharded(3, 8, 4), donate="init")
    torch_xla.sync(wait=True)
    assert is_donated(init)
    assert torch.equal(final.cpu(), expected.cpu()) and torch.equal(ys.cpu(), expected_ys.cpu())
    (donor,) = donation_report(steps=1).donors
    assert (donor.name, donor.outcome, donor.bytes_per_device) == ("init", "donated", 32)
    assert aliased_bytes(dump_folder) == [8 * 4 * 4 // 4]


@needs_jax
@spmd_scan_gradients
@pytest.mark.filterwarnings("ignore")
@in_process(devices=4)
def test_under_spmd_the_backward_scan_reads_all_arguments():
    """So none of them is donated."""

    def run(function, **options):
        init, weights = sharded(8, 4), sharded(3, 8, 4).requires_grad_()
        final, ys = function(multiply_and_sum, init, weights, **options)
        torch_xla.sync(wait=True)
        (final.sum() + ys.sum()).backward()
        return init, weights.grad.cpu()

    _, expected = run(host_scan)
    init, gradient = run(scan, donate="init")
    assert not is_donated(init) and torch.equal(gradient, expected)
    with pytest.raises(DonationError, match="init: autograd has saved it for the backward scan"):
        run(scan, donate="init", strict=True)


@lacking("2.8", "a body that XLA refuses ends the process (ConsumeValue; 2.9 throws)")
@pytest.mark.parametrize("options", [None, {}, {"pure": True}], ids=["plain", "lazy", "pure"])
@in_process
def test_a_kept_error_of_a_scan_does_not_end_the_process(options):
    """An error of torch_xla, which the program still has at the next sync."""

    # torch_xla lowers the mask of a dropout that is an output to another type than it expects.
    def body(carry, x):
        return carry * x, torch.nn.functional.dropout(carry, 0.5)

    def run(init, xs):
        return scan(body, init, xs)

    if options is not None:
        run = compile(run, **options)
    init, xs = torch.ones(3).to("xla"), torch.ones(4, 3).to("xla")
    torch_xla.sync()
    try:
        run(init, xs)
    except RuntimeError as error:
        kept = error
    result = init + 1
    torch_xla.sync(wait=True)
    assert "PRED vs update.element_type: F32" in str(kept) and result.tolist() == [2, 2, 2]


class Scanning(torch.autograd.Function):
    """Its backward pass scans."""

    @staticmethod
    def forward(ctx, init, xs):
        ctx.save_for_backward(xs)
        return init.clone()

    @staticmethod
    def backward(ctx, gradient):
        final, _ = scan(lambda carry, x: (carry * 2, carry + x), gradient, *ctx.saved_tensors)
        return final, None


@in_process
def test_a_scan_ends_while_a_backward_pass_waits_to_scan():
    """Autograd has one thread for the device, which scans. The trace of another scan must not need it."""
    init, xs = torch.ones(3).to("xla").requires_grad_(), torch.ones(4, 3).to("xla")
    torch_xla.sync()
    result, started, reached = [], threading.Event(), threading.Event()

    def at_the_lock():
        if torch._C._current_graph_task_id() != -1:
            reached.set()

    def slow(carry, x):
        started.set()
        assert reached.wait(100)
        return carry + x, carry * 2

    lock = mock.Mock(wraps=threading.RLock())
    lock.acquire.side_effect = lambda: at_the_lock() or mock.DEFAULT
    _host.loops._scanning = lock
    other = threading.Thread(target=lambda: result.extend(scan(slow, init.detach(), xs)))
    other.start()
    started.wait()
    Scanning.apply(init, xs).sum().backward()
    other.join()
    torch_xla.sync()
    assert init.grad.tolist() == [16, 16, 16] and result[0].tolist() == [5, 5, 5]


@in_process
def test_in_eager_mode_a_compiled_function_may_scan():
    """Outside such a function scan is refused: torch_xla's own ends the process."""
    torch_xla.experimental.eager_mode(True)
    init, xs = torch.zeros(3).to("xla"), torch.ones(4, 3).to("xla")

    def loop(init, xs):
        return scan(lambda carry, x: (carry + x, carry * 2), init, xs, donate="init")

    for call in (lambda: loop(init, xs), lambda: scan_layers([torch.nn.Linear(3, 3).to("xla")] * 2, init)):
        with pytest.raises(DonationError, match="scan is called in eager mode"):
            call()
    final, ys = compile(loop)(init, xs)
    assert final.tolist() == [4, 4, 4] and ys.tolist() == [[2 * k] * 3 for k in range(4)]
    assert donation_report().donors[-1].outcome == "donated"
