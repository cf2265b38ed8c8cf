"""auto_donate in separate processes: its environment variable, SPMD, and several devices."""

from __future__ import annotations

import os
import threading
from signal import SIGALRM, SIGINT, raise_signal
from signal import signal as handle_signal

import pytest
import ranks
import torch
import torch_xla
from children import in_process, run_in_child
from helpers import compiles, consume, loops_with_and_without_donation, pointer
from sharding import mesh, shard

from torch_xla_donate import _host, auto_donate, donate_buffer, donation_report, hlo, set_auto_donate

SWITCHED_ON = {"TORCH_XLA_DONATE_AUTO": "1"}
TWO_DEVICES = {"CPU_NUM_DEVICES": "2"}


@in_process(env=SWITCHED_ON)
def test_the_environment_donates_and_the_hlo_has_donor_and_alias(dump_folder):
    p, g = torch.ones(8, 4).to("xla"), torch.ones(8, 4).to("xla")
    torch_xla.sync(wait=True)
    p = p - 0.5 * g
    torch_xla.sync(wait=True)
    assert [(donor.automatic, donor.outcome) for donor in donation_report().donors] == [(True, "donated")]
    (module,) = [m for m in hlo.read_dump(dump_folder) if m.before is not None and m.before.donors]
    (donor,) = module.before.donors
    (alias,) = module.after.aliases
    assert alias.donor == donor
    assert p[0].tolist() == [0.5] * 4


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"XLA_DISABLE_FUNCTIONALIZATION": "1"}, "functionalization is off (XLA_DISABLE_FUNCTIONALIZATION=1)"),
        ({}, "torch keeps nodes for later graphs (torch_lazy_reuse_ir)"),
    ],
    ids=["functionalization", "reuse_ir"],
)
@in_process(env=lambda env: {**SWITCHED_ON, **env})
def test_the_report_says_where_liveness_is_unknown(env, reason):
    torch._C._lazy._set_reuse_ir(not env)
    t = torch.arange(4.0).to("xla")
    for _ in range(2):
        t = t + 1
        torch_xla.sync()
    assert t.tolist() == [2, 3, 4, 5]
    report = donation_report()
    assert report.donors == ()
    assert f"auto_donate skipped 2 steps: {reason}" in str(report)


@in_process
def test_a_view_made_after_functionalization_was_switched_off_keeps_its_base():
    """torch_xla reads the variable at each operation."""
    set_auto_donate(True)
    base = torch.arange(8.0).to("xla")
    torch_xla.sync(wait=True)
    base = base + 1
    torch_xla.sync(wait=True)
    assert [donor.outcome for donor in donation_report().donors] == ["donated"]
    os.environ["XLA_DISABLE_FUNCTIONALIZATION"] = "1"
    base = torch.arange(8.0).to("xla")
    view = base[2:]
    for _ in range(3):
        base = base + 1
        torch_xla.sync(wait=True)
    assert base.tolist() == list(range(3, 11)) and view.tolist() == list(range(2, 8))
    (reason,) = donation_report().auto_refusals
    assert "functionalization is off and a live tensor is a view" in reason


@in_process
def test_an_error_while_the_first_step_is_prepared_is_raised():
    """As by the handler of a signal. The next step prepares again."""

    def too_slow(number, frame):
        raise TimeoutError("too slow")

    handle_signal(SIGALRM, too_slow)
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
    assert [donor.outcome for donor in report.donors] == ["donated"] * 3
    assert report.auto_refusals == {}
    assert p[0].tolist() == [16.0] * 4


# --- SPMD ---


def made(spec=("x", None)):
    mesh()
    t = shard(torch.ones(8, 4).to("xla"), *spec)
    torch_xla.sync(wait=True)
    return t


def unusable_step():
    """A graph that cannot use its donor, as the output is whole on each device."""
    q = shard(made() * 2, None, None)
    torch_xla.sync(wait=True)
    return q


@in_process(env=SWITCHED_ON, devices=4)
def test_an_unusable_automatic_donor_leaves_bool_and_fraction_of_the_report():
    _q = unusable_step()
    report = donation_report()
    assert [(d.automatic, d.outcome) for d in report.donors] == [(True, "unusable")]
    assert not report and report.offered == () and report.reused_fraction == 0.0
    assert "0 of 0 donors donated, 0 B (0.0% of the bytes offered); 1 automatic not used" in str(report)

    consume(made(), wait=True)
    report = donation_report()
    assert [(d.automatic, d.outcome) for d in report.donors] == [(True, "unusable"), (False, "donated")]
    assert report and report.reused_fraction == 1.0 and len(report.offered) == 1
    assert "1 of 1 donors donated, 128 B (100.0% of the bytes offered); 1 automatic not used" in str(report)


@in_process(env=SWITCHED_ON, devices=4)
def test_a_graph_offers_only_once_what_its_sharding_rules_out():
    counts = []
    for _ in range(5):
        unusable_step()
        counts.append((compiles(), len(donation_report().donors)))
    assert len(donation_report().donors) == 1
    # The graph with its donor, and without.
    assert counts[1][0] == counts[0][0] + 1 and counts[-1] == counts[1]

    # The bound is one for each graph: another one of the same arrays has its donors.
    p = made()
    for _ in range(3):
        p = shard(p * 3, "x", None)
        torch_xla.sync(wait=True)
    assert [d.outcome for d in donation_report(steps=3).donors] == ["donated"] * 3
    assert p.tolist() == [[27.0] * 4] * 8


@in_process(env=SWITCHED_ON, devices=4)
def test_of_two_inputs_the_one_that_sharding_lets_through_is_donated():
    """From the second step on."""
    for _ in range(3):
        a, b = made(), made((None, None))
        out = shard(a + b, None, None)
        del a, b
        torch_xla.sync(wait=True)
    assert [d.outcome for d in donation_report().donors] == ["unusable", "donated", "donated"]
    assert out.tolist() == [[2.0] * 4] * 8


# --- Several devices ---


def test_each_device_of_a_process_has_donors_of_its_own():
    """Threads that step at the same time, each with its loop, its kept tensors, and a cache that stays in place."""
    options = {"start_method": "fork"}  # test_processes.py has all of them
    env = {"CPU_NUM_DEVICES": "3"}
    done = run_in_child(torch_xla.launch, loops_with_and_without_donation, kwargs=options, env=env)
    assert sorted(done.stdout.splitlines()) == ["0 1", "1 1", "2 1"]


@in_process(env=TWO_DEVICES)
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


@in_process(env=TWO_DEVICES)
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


@in_process(env=TWO_DEVICES)
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


@in_process(env=TWO_DEVICES)
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
            q = consume(p, wait=True)
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
