"""Steps that go wrong, settings, signals, and other modes of torch_xla: each in a separate process."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import warnings

import bare
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
from children import in_process, run_in_child
from helpers import assert_a_step_donates, compiles, consume, make, run_in_a_fork
from interrupts import with_pending
from sanitize import threads
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    _locks,
    auto_donate,
    cancel_donation,
    compile,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
    set_auto_donate,
)
from torch_xla_donate._host import switches


def assert_nothing_is_left(t: torch.Tensor, kept: torch.Tensor) -> None:
    """After a failed step: both tensors are as they were, and a step can donate."""
    assert t.tolist() == list(range(8)) and kept.tolist() == [0, 1, 2, 3]
    assert consume(t).tolist() == list(range(1, 9))


@pytest.mark.parametrize("automatic", [False, True])
@in_process
def test_a_step_that_does_not_compile_leaves_nothing_behind(automatic):
    t, kept = make(8), make(4)
    given = t.clone() if automatic else t
    torch_xla.sync()
    if not automatic:
        donate_buffer(t)
    broken = stablehlo_custom_call((given,), "no_such_target", [[8]], [torch.float32])
    del given
    with auto_donate(automatic), pytest.raises((RuntimeError, ValueError), match="custom.call|no_such_target"):
        torch_xla.sync()
    assert _C.sizes()["pending"] == 0 and _C.sizes()["consumed"] == 0
    (donor,) = donation_report().donors
    assert (donor.outcome, donor.reason) == ("unusable", "the step failed: it did not compile")
    del broken
    torch_xla.sync(wait=True)
    assert_nothing_is_left(t, kept)


@pytest.mark.parametrize("wait", [True, False])
@in_process
def test_a_step_that_fails_while_it_runs_leaves_nothing_behind(wait):
    t, kept = make(8), make(4)
    donate_buffer(t)
    # More memory than any machine has.
    broken = t.reshape(8, 1, 1, 1).expand(8, 1 << 20, 1 << 20, 1 << 10) + 1
    if wait:
        with pytest.raises(RuntimeError, match="memory"):
            torch_xla.sync(wait=True)
    else:
        try:
            torch_xla.sync()
            donation_report()
        except RuntimeError as error:
            assert "memory" in str(error)
    assert _C.sizes()["pending"] == 0 and _C.sizes()["consumed"] == 0
    (donor,) = donation_report().donors
    assert donor.outcome == "unusable" and donor.reason.startswith("the step failed: ")
    assert "Out of memory" in donor.reason
    del broken
    with contextlib.suppress(RuntimeError):  # torch_xla reports the failure once more
        torch_xla.sync(wait=True)
    assert_nothing_is_left(t, kept)


@in_process
def test_outputs_of_a_step_that_an_earlier_failure_stops_do_no_harm():
    a, b = make(8), make(8)
    consume(make(8), wait=True)
    broken = b.reshape(8, 1, 1, 1).expand(8, 1 << 20, 1 << 20, 1 << 10) + 1
    with contextlib.suppress(RuntimeError):
        torch_xla.sync()
    del broken
    outputs = b * 2, a + 1
    donate_buffer(a)  # so the second output comes first
    with contextlib.suppress(RuntimeError):
        torch_xla.sync()
    assert not is_donated(a) and len(outputs) == 2
    torch_xla.sync(wait=True)
    assert (a + 1).tolist() == list(range(1, 9))


@pytest.mark.parametrize("read", ["value", "graph", "error"])
@in_process
def test_a_frame_that_runs_code_or_has_no_line_does_a_recorded_step_no_harm(read):
    """Python's garbage collector runs finalizers at any allocation; a name's ``__str__`` does so at a known one."""
    x, found = make(4), []

    class Name:
        def __str__(self):
            found.append(0)
            if len(found) % 2:  # the read has a frame, too
                {"value": lambda: x, "graph": lambda: x + 1, "error": lambda: int("no")}[read]().tolist()
            return "odd"

    _C.log_runs(_C.take_runs)
    for _ in range(3):
        t = make(8)
        donate_buffer(t)
        out = t + 1
        namespace = {"__name__": Name(), "sync": torch_xla.sync}
        exec("def step(): sync()", namespace)
        step = namespace["step"]
        step.__code__ = step.__code__.replace(co_linetable=b"")
        step()
        assert out.tolist() == list(range(1, 9))
    assert found
    assert consume(make(8)).tolist() == list(range(1, 9))


@in_process(env={"XLA_COMPILATION_CACHE_SIZE": "1"})
def test_the_graph_text_of_a_graph_that_was_compiled_again():
    for _ in range(2):
        for compute in (torch.sin, torch.cos):
            consume(make(8), compute, wait=True)
            assert "input_output_alias" in _C.graph_text(_C.steps()[-1]["graph"])


@in_process(env={"XLA_DISABLE_FUNCTIONALIZATION": "1"})
def test_without_functionalization_donation_and_errors_work():
    t = make(8)
    out = consume(t, lambda t: t * 2)
    for use in (
        lambda: t + 1,
        lambda: t.cpu(),
        lambda: t[2:],
        lambda: t.add_(1),
        lambda: t.detach().cpu(),
    ):
        with pytest.raises(DonatedBufferError):
            use()
    assert out.tolist() == list(range(0, 16, 2))

    viewed = make(8)
    view = viewed[2:]
    with pytest.raises(DonationError, match="functionalization is off"):
        donate_buffer(viewed)

    later = make(8)
    donate_buffer(later)
    view = later[2:]
    out = later * 2
    with pytest.warns(DonationWarning, match="it has views"):
        torch_xla.sync(wait=True)
    assert view.tolist() == list(range(2, 8)) and later.tolist() == list(range(8))

    a, b = make(4), make(4)
    donate_buffer([a, b])
    a.mul_(2)
    c = b + 1
    torch_xla.sync()
    assert a.tolist() == [0, 2, 4, 6] and c.tolist() == [1, 2, 3, 4] and is_donated(b)


def test_a_setting_that_is_neither_yes_nor_no_fails_the_import():
    for name in ("AUTO", "KEEP_ORDER", "DEBUG_NANS"):
        name = f"TORCH_XLA_DONATE_{name}"
        done = run_in_child(bare.import_package, env={name: "perhaps"}, exit_code=1)
        assert f"{name}='perhaps' is neither yes nor no. Set it to 1 or 0." in done.stderr


@in_process(devices=4)
def test_auto_sharding_that_begins_between_steps_is_noticed():
    import torch_xla.runtime as xr

    xr.use_spmd()
    out = make(4)
    with auto_donate():
        for step in range(4):
            if step == 2:
                xr.use_spmd(auto=True)
            out = out + 1
            torch_xla.sync(wait=True)
    report = donation_report()
    assert [donor.outcome for donor in report.donors] == ["donated", "donated"]
    ((reason, count),) = report.auto_refusals.items()
    assert "auto-sharding" in reason and count == 2
    assert out.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_ENABLE_PARAM_ALIASING", "0"),
        ("XLA_STABLEHLO_COMPILE", "1"),
        ("XLA_AUTO_SPMD", "1"),
    ],
)
@in_process(env=lambda name, value: {name: value})
def test_a_setting_that_switches_donation_off_is_named_once(name, value):
    setting = f"{name}={value}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            t = make(4)
            donate_buffer(t)
            out = t + 1
            torch_xla.sync(wait=True)
            assert setting in donation_report(steps=1).donors[0].reason
            assert not is_donated(t) and t.tolist() == [0, 1, 2, 3]
        with donation_disabled(report_reuse=True):
            donate_buffer(t)
            out = t + 1
            torch_xla.sync(wait=True)
        assert t.tolist() == [0, 1, 2, 3]  # with donation enabled, too: no warning is due
    (warning,) = [w for w in caught if w.category is DonationWarning]
    assert setting in str(warning.message) and " switches donation off" in str(warning.message)
    assert warning.filename == __file__
    *marked, _ = donation_report().donors
    assert len(marked) == 3 and all(setting in donor.reason for donor in marked)
    with auto_donate():
        for _ in range(2):
            out = out + 1
            torch_xla.sync()
    report = donation_report()
    ((reason, count),) = report.auto_refusals.items()
    assert setting in reason and count == 2
    assert len(report.donors) == 4


@pytest.mark.filterwarnings("ignore")
@in_process
def test_a_setting_read_at_each_compilation_may_change():
    """torch_xla reads XLA_STABLEHLO_COMPILE whenever it compiles."""

    def step():
        t = make(4)
        donate_buffer(t)
        out = t + 1
        torch_xla.sync(wait=True)
        assert out.tolist() == [1, 2, 3, 4]
        return is_donated(t), donation_report(steps=1).donors[0].reason

    os.environ["XLA_STABLEHLO_COMPILE"] = "1"
    off = (False, "XLA_STABLEHLO_COMPILE=1 makes torch_xla ignore every donor")
    assert step() == off
    del os.environ["XLA_STABLEHLO_COMPILE"]
    assert step() == step() == (True, "")
    os.environ["XLA_STABLEHLO_COMPILE"] = "1"
    assert step() == off


# --- Threads and forks ---


@in_process
def test_threads_mark_cancel_report_and_step_at_once():
    """`make sanitize` runs more rounds of it, with each sanitizer."""
    threads.run(40)


@in_process
def test_a_fork_before_the_runtime_starts_can_donate():
    assert not torch_xla._XLAC._xla_runtime_is_initialized()
    assert run_in_a_fork(assert_a_step_donates) == 0
    assert_a_step_donates()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@in_process
def test_the_registry_survives_a_fork_while_other_threads_use_it():
    stop, all_read = threading.Event(), threading.Barrier(4)
    t = make(4)
    donate_buffer(t)

    def read():
        _C.sizes()
        all_read.wait()
        while not stop.is_set():
            _C.sizes()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    all_read.wait()
    try:
        assert not any(run_in_a_fork(lambda: _C.sizes()["pending"] == 1) for _ in range(20))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    cancel_donation(t)


def the_lock_is_still_ours() -> None:
    switches.compiling.release()
    with pytest.raises(RuntimeError):
        switches.compiling.release()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@in_process
def test_after_a_fork_locks_of_other_threads_are_free_and_ones_own_stay():
    with switches.compiling:
        assert run_in_a_fork(the_lock_is_still_ours) == 0
    assert switches.compiling in _locks._locks
    held, ended = threading.Event(), threading.Event()

    def hold():
        with contextlib.ExitStack() as locks:
            for lock in _locks._locks:
                locks.enter_context(lock)
            held.set()
            ended.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    try:
        assert run_in_a_fork(lambda: all(lock.acquire(blocking=False) for lock in _locks._locks)) == 0
        assert not switches.compiling.acquire(blocking=False)
    finally:
        ended.set()
        holder.join()


# --- What the hooks remember ---


@in_process(env={"XLA_COMPILATION_CACHE_SIZE": "1"})
def test_executables_that_torch_xla_has_freed_are_forgotten():
    _C.log_runs(_C.take_runs)
    known = []
    for size in range(1, 81):
        out = consume(make(size), wait=True)
        known.append(_C.sizes()["executables"])
        assert out[0].item() == 1
    # Entries of freed executables go when their number has doubled.
    assert max(known) < 50


@in_process(env={"XLA_COMPILATION_CACHE_SIZE": "1"})
def test_a_graph_that_was_evicted_draws_the_same_random_numbers():
    x = make(3)

    def draws(evicted):
        torch_xla.manual_seed(3)
        torch_xla.sync()  # the seed, too
        f = compile(lambda x: torch.rand_like(x), pure=True)
        found = []
        for size in range(4, 8):
            found.append(f(x))
            if evicted:
                (torch.ones(size, device="xla") * 3).sum().item()  # another graph takes its place
        return torch.stack(found).tolist()

    before = compiles()
    once = draws(False)
    between = compiles()
    assert draws(True) == once
    assert compiles() - between >= between - before + 3


# --- Listings, and other modes ---


def list_for_dynamos_check():
    torch_xla._XLAC._check_device_tensor_need_materialization(str(torch_xla.device()))


def list_for_dynamos_clearing():
    torch.compile(lambda x: x * 9, backend="openxla")(make(5))


def list_for_a_report():
    torch_xla._XLAC._xla_tensors_report(0, str(torch_xla.device()))


@pytest.mark.parametrize("listing", [list_for_dynamos_check, list_for_dynamos_clearing, list_for_a_report])
@in_process
def test_a_partial_sync_after_a_listing_does_not_donate(listing):
    """torch_xla lists the live tensors outside a step too; such a list must not pass for that of the step."""
    t = make(4)
    w, a = t * 3, t + 5
    if listing is not list_for_dynamos_clearing:  # which computes all that is pending
        donate_buffer(t)
        listing()
    else:
        listing()
        donate_buffer(t)
    torch_xla._XLAC._xla_sync_multi([t, w], [], True, True)
    assert not is_donated(t)
    assert _C.sizes()["pending"] == 1
    assert (w.tolist(), a.tolist(), t.tolist()) == ([0, 3, 6, 9], [5, 6, 7, 8], [0, 1, 2, 3])
    out = t + 1
    torch_xla.sync()
    assert is_donated(t) and out.tolist() == [1, 2, 3, 4]


@in_process
def test_a_use_after_a_listing_is_our_error():
    first, t = make(3), make(4)
    out = consume(t)
    list_for_dynamos_check()
    with pytest.raises(DonatedBufferError):
        t.cpu()
    torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
    with pytest.raises(DonatedBufferError):
        t + 1
    assert (first.tolist(), out.tolist()) == ([0, 1, 2], [1, 2, 3, 4])


@in_process
def test_a_use_after_a_listing_that_reads_nothing_is_our_error():
    """The read of the first listed tensor passes for the list's. Only the hook on its node sees the use."""
    t = make(4)
    out = consume(t)
    list_for_a_report()
    with pytest.raises(DonatedBufferError):
        t[1:]
    assert out.tolist() == [1, 2, 3, 4]


@in_process
def test_dynamo_works_beside_a_donated_tensor():
    t = make(4)
    out = consume(t)
    compiled = torch.compile(lambda x: x * 2, backend="openxla")
    assert compiled(out).tolist() == [2, 4, 6, 8]
    assert compiled(make(4)).tolist() == [0, 2, 4, 6]
    with pytest.raises(Exception, match="was donated at"):
        compiled(t)
    assert compiled(out).tolist() == [2, 4, 6, 8]


# --- Signals ---
#
# Python runs a signal's handler before the next bytecode, wherever that is: after a step, in a callback of the hooks.

ERRORS = {signal.SIGINT: KeyboardInterrupt, signal.SIGALRM: TimeoutError, signal.SIGTERM: SystemExit}


def install_handlers() -> None:
    def handle(number, frame):
        raise ERRORS[number](number)

    for number in ERRORS:
        signal.signal(number, handle)


@pytest.mark.parametrize("marks", [True, False])
@in_process
def test_a_signal_that_is_pending_when_a_step_ends_loses_nothing(marks):
    install_handlers()
    set_auto_donate(not marks)
    marker = functools.partial(torch_xla._XLAC._xla_step_marker, "xla:0", [], True)
    p, seen = make(8, 8), []
    for count, (number, error) in enumerate(ERRORS.items(), 1):
        odd = make(3)
        q, old = [p * 1], p
        torch_xla._XLAC._xla_all_reduce_inplace("sum", q, 1.0, [[0]], True)
        p, total = q[0] + 1, odd.sum()
        if marks:
            donate_buffer([old, odd])
        xm.add_step_closure(seen.append, args=(count,))
        del q, old
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            assert with_pending(number, marker) is error
            assert not shown
            torch_xla.sync()
        # A due warning comes at the end of the next step, once for the line.
        assert len(shown) == (marks and count == 1)
        assert seen == list(range(1, count + 1))
        assert p.tolist() == (torch.arange(64.0).reshape(8, 8) + count).tolist()
        assert odd.tolist() == [0, 1, 2] and total.item() == 3
        donor = donation_report(steps=1).donors[0]
        assert (donor.array, donor.outcome, donor.step) == ("f32[8,8]", "donated", count)


@in_process
def test_a_signal_pending_at_a_use_after_donation_is_not_lost():
    install_handlers()
    t = make(4)
    out = consume({"weight": t}, lambda state: state["weight"] + 1)
    for number, error in ERRORS.items():
        assert with_pending(number, functools.partial(torch.Tensor.cpu, t)) is error
        with pytest.raises(DonatedBufferError, match=r"\['weight'\]"):
            t.cpu()
    assert out.tolist() == [1, 2, 3, 4]


@in_process
def test_an_interrupt_while_a_warning_is_shown_is_not_lost():
    """Nor does it pass for the warning, which becomes its cause."""
    install_handlers()

    def show(*arguments, **options):
        os.kill(os.getpid(), signal.SIGINT)

    warnings.simplefilter("always")
    warnings.showwarning = show
    a, b = make(3), make(5)
    donate_buffer(a)
    donate_buffer(b, strict=True)
    total = a.sum() + b.sum()
    with pytest.raises(KeyboardInterrupt) as raised:
        torch_xla.sync(wait=True)
    assert "f32[5]" in str(raised.value.__cause__)
    assert total.item() == 13 and a.tolist() == [0, 1, 2]


@in_process
def test_an_error_inside_a_hook_is_in_the_report():
    for _ in range(2):
        _C.note_error("out of memory")
    report = donation_report()
    assert report.errors == {"out of memory": 2} == report.to_dict()["errors"]
    assert "A hook failed 2 times and the step went on without it: out of memory." in str(report)


@in_process
def test_the_first_step_with_donors_counts_those_before():
    value, compiled = make(23), []
    for operations, mark in ((1, False), (2, True), (2, True), (3, False)):
        if mark:
            donate_buffer(value)
        for _ in range(operations):
            value = value * value
        torch_xla.sync()
        compiled.append([step.compilations for step in donation_report().steps])
    assert compiled == [[], [2], [2, 0], [2, 0, 1]]
    assert metrics.counter_value("UncachedCompile") == 3
    assert value.shape == (23,)
