"""Steps that go wrong, settings, and other modes of torch_xla: each in a fresh process."""

from __future__ import annotations

import pytest
from helpers import RAISES, run_script

PRELUDE = """
import sys, threading, warnings
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla_donate
from torch_xla_donate import *
from torch_xla_donate import _C

def make(*shape):
    count = 1
    for size in shape:
        count *= size
    t = torch.arange(float(count)).reshape(shape).to("xla")
    torch_xla.sync(wait=True)
    return t

def infos(*tensors):
    # The ids that torch_xla keeps with the buffers of the tensors; ours must never stay there.
    arguments = [[t + 0 for t in tensors], []]
    if torch_xla.__version__.startswith("2.7"):
        arguments.pop()
    return torch_xla._XLAC._get_tensors_xla_device_data_node(*arguments)[0]
"""


# Python runs a signal's handler before the next bytecode, wherever that is: after a step, in a callback of the hooks.
SIGNALS = """
import collections, functools, hashlib, operator, os, signal, time

def handler(error):
    def handle(number, frame):
        raise error(number)
    return handle

signal.signal(signal.SIGALRM, handler(TimeoutError))
signal.signal(signal.SIGTERM, handler(SystemExit))
ERRORS = {signal.SIGINT: KeyboardInterrupt, signal.SIGALRM: TimeoutError, signal.SIGTERM: SystemExit}

def send_soon(number):
    sender = threading.Timer(0.2, os.kill, (os.getpid(), number))
    sender.start()

def with_pending(number, call):
    # Calls what is no Python code with a signal pending, and returns the type of what is raised. Until that call runs
    # some bytecode there is none.
    busy = functools.partial(hashlib.pbkdf2_hmac, "sha256", b"", b"", 2_000_000)
    calls = map(operator.methodcaller("__call__"), [busy, call])
    send_soon(number)
    try:
        collections.deque(calls, maxlen=0)
    except BaseException as error:
        return type(error)
"""


def run(body: str, before: str = "", **options):
    import textwrap

    return run_script(PRELUDE + RAISES + before + textwrap.dedent(body) + "\nprint('end')", **options)


def test_a_step_that_does_not_compile_leaves_nothing_behind():
    done = run(
        """
        from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call
        t, kept = make(8), make(4)
        before = infos(t)
        donate_buffer(t)
        broken = stablehlo_custom_call((t,), "no_such_target", [[8]], [torch.float32])
        raises(Exception, torch_xla.sync)
        assert _C.sizes()["pending"] == 0 and _C.sizes()["consumed"] == 0, _C.sizes()
        assert infos(t) == before
        (donor,) = donation_report().donors
        assert (donor.outcome, donor.reason) == ("unusable", "the step failed: it did not compile"), donor
        del broken
        torch_xla.sync(wait=True)
        assert t.tolist() == list(range(8)) and kept.tolist() == [0, 1, 2, 3]
        donate_buffer(t)
        out = t + 1
        torch_xla.sync()
        assert is_donated(t) and out.tolist() == list(range(1, 9))
        """
    )
    assert done.stdout.endswith("end\n")


@pytest.mark.parametrize("wait", ["True", "False"])
def test_a_step_that_fails_while_it_runs_leaves_nothing_behind(wait):
    run(
        f"""
        t, kept = make(8), make(4)
        before = infos(t)
        donate_buffer(t)
        # More memory than any machine has.
        broken = t.reshape(8, 1, 1, 1).expand(8, 1 << 20, 1 << 20, 1 << 10) + 1
        try:
            torch_xla.sync(wait={wait})
            assert not {wait}
            donation_report()
        except RuntimeError as error:
            assert "memory" in str(error)
        assert _C.sizes()["pending"] == 0 and _C.sizes()["consumed"] == 0, _C.sizes()
        (donor,) = donation_report().donors
        assert donor.outcome == "unusable" and donor.reason.startswith("the step failed: "), donor
        assert "Out of memory" in donor.reason, donor
        del broken
        try:
            torch_xla.sync(wait=True)  # torch_xla tells of the failure once more
        except RuntimeError:
            pass
        assert infos(t) == before
        assert t.tolist() == list(range(8)) and kept.tolist() == [0, 1, 2, 3]
        donate_buffer(t)
        out = t + 1
        torch_xla.sync()
        assert is_donated(t) and out.tolist() == list(range(1, 9))
        """
    )


def test_infos_are_the_same_before_and_after_a_donating_step():
    run(
        """
        t, other = make(8), make(8)
        before = infos(other)
        donate_buffer([t, other])
        total = (t + other).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch_xla.sync(wait=True)
        assert infos(other) == before, (infos(other), before)
        """
    )


def test_without_functionalization_donation_and_errors_work():
    run(
        """
        t = make(8)
        donate_buffer(t)
        out = t * 2
        torch_xla.sync()
        assert is_donated(t)
        raises(DonatedBufferError, lambda: t + 1)
        raises(DonatedBufferError, lambda: t.cpu())
        raises(DonatedBufferError, lambda: t[2:])
        raises(DonatedBufferError, lambda: t.add_(1))
        raises(DonatedBufferError, lambda: t.detach().cpu())
        assert out.tolist() == list(range(0, 16, 2))

        viewed = make(8)
        view = viewed[2:]
        assert "functionalization is off" in raises(DonationError, lambda: donate_buffer(viewed))

        later = make(8)
        donate_buffer(later)
        view = later[2:]
        out = later * 2
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch_xla.sync(wait=True)
        assert "it has views" in str(caught[0].message), caught
        assert view.tolist() == list(range(2, 8)) and later.tolist() == list(range(8))

        a, b = make(4), make(4)
        donate_buffer([a, b])
        a.mul_(2)
        c = b + 1
        torch_xla.sync()
        assert a.tolist() == [0, 2, 4, 6] and c.tolist() == [1, 2, 3, 4] and is_donated(b)
        """,
        env={"XLA_DISABLE_FUNCTIONALIZATION": "1"},
    )


SETTINGS = [
    ("XLA_ENABLE_PARAM_ALIASING", "0"),
    ("XLA_ENABLE_PARAM_ALIASING", "false"),
    ("XLA_STABLEHLO_COMPILE", "1"),
    ("XLA_AUTO_SPMD", "1"),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_a_setting_that_switches_donation_off_is_named_once(name, value):
    run(
        f"""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                t = make(4)
                donate_buffer(t)
                out = t + 1
                (pending,) = donation_report(predict=True).pending
                assert pending.prediction == "unusable" and "{name}={value}" in pending.reason, pending
                torch_xla.sync(wait=True)
                assert not is_donated(t) and t.tolist() == [0, 1, 2, 3]
            with donation_disabled(report_reuse=True):
                donate_buffer(t)
                out = t + 1
                torch_xla.sync(wait=True)
            assert t.tolist() == [0, 1, 2, 3]  # with donation on, too, so there is nothing to tell
        (warning,) = [w for w in caught if w.category is DonationWarning]
        assert "{name}={value}" in str(warning.message) and " switches donation off" in str(warning.message), warning
        assert warning.filename == __file__
        *marked, disabled = donation_report().donors
        assert len(marked) == 3 and all("{name}={value}" in donor.reason for donor in marked), marked
        with auto_donate():
            for _ in range(2):
                out = out + 1
                torch_xla.sync()
        report = donation_report()
        ((reason, count),) = report.auto_refusals.items()
        assert "{name}={value}" in reason and count == 2, report
        assert len(report.donors) == 4, report
        """,
        env={name: value},
    )


def test_a_setting_that_torch_xla_reads_at_each_compilation_may_change():
    run(
        """
        import os
        warnings.simplefilter("ignore")
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
        """
    )


def test_two_threads_may_take_turns_in_stepping_and_donating():
    run(
        """
        errors = []
        # One at a time: stock torch_xla itself fails ("handle != nullptr") when one thread reads while another steps.
        lock = threading.Lock()
        def loop(k):
            try:
                for _ in range(30):
                    with lock:
                        t = torch.full((64 + k,), float(k)).to("xla")
                        torch_xla.sync()
                        donate_buffer(t)
                        out = t * 2
                        torch_xla.sync()
                        assert out[0].item() == 2 * k
                        assert is_donated(t)
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=loop, args=(k,)) for k in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert errors == [], errors
        """
    )


def test_marks_made_while_another_thread_steps_do_no_harm():
    # Materialised beforehand: stock torch_xla fails by itself when one thread makes tensors while another steps.
    run(
        """
        idle = [make(16) for _ in range(8)]
        donate_buffer(idle)  # the first donation verifies the layouts with a tensor of its own
        cancel_donation(idle)
        stop = threading.Event()
        errors, rounds = [], [0]
        def mark():
            while not stop.is_set():
                try:
                    donate_buffer(idle)
                    cancel_donation(idle)
                    rounds[0] += 1
                except BaseException as error:
                    errors.append(error)
                    return
        thread = threading.Thread(target=mark)
        thread.start()
        try:
            value = make(64)
            for _ in range(200):
                donate_buffer(value)
                new = value + 1
                torch_xla.sync()
                value = new
        finally:
            stop.set()
            thread.join()
        assert errors == [] and rounds[0] > 10, (errors, rounds)
        assert value[0].item() == 200
        assert [t.tolist() for t in idle] == [list(range(16))] * 8
        assert torch_xla_donate.donation_report()
        """
    )


def test_a_warning_that_nobody_collected_is_made_at_exit():
    done = run("t = make(3); donate_buffer(t); total = t.sum(); torch_xla.sync()")
    assert "DonationWarning: Some donated buffers were not usable: f32[3]" in done.stderr


def test_warnings_as_errors_raise_from_the_sync_and_lose_nothing():
    run(
        """
        warnings.simplefilter("error", DonationWarning)
        t, other = make(3), make(5)
        donate_buffer(t)
        total, kept = t.sum(), other + 1
        assert "not usable" in raises(DonationWarning, lambda: torch_xla.sync(wait=True))
        assert (total.item(), kept.tolist(), t.tolist()) == (3, [1, 2, 3, 4, 5], [0, 1, 2])
        """
    )


def test_a_partial_sync_after_somebody_listed_the_live_tensors_does_not_donate():
    run(
        """
        xlac = torch_xla._XLAC
        listings = {
            "dynamo's check": lambda: xlac._check_device_tensor_need_materialization(str(torch_xla.device())),
            "dynamo's clearing": lambda: torch.compile(lambda x: x * 9, backend="openxla")(make(5)),
            "a report": lambda: xlac._xla_tensors_report(0, str(torch_xla.device())),
        }
        for name, listing in listings.items():
            t = make(4)
            w, a = t * 3, t + 5
            if name != "dynamo's clearing":  # which computes what is pending
                donate_buffer(t)
                listing()
            else:
                listing()
                donate_buffer(t)
            xlac._xla_sync_multi([t, w], [], True, True)
            assert not is_donated(t), name
            assert _C.sizes()["pending"] == 1, name
            assert (w.tolist(), a.tolist(), t.tolist()) == ([0, 3, 6, 9], [5, 6, 7, 8], [0, 1, 2, 3]), name
            out = t + 1
            torch_xla.sync()
            assert is_donated(t) and out.tolist() == [1, 2, 3, 4], name
        """
    )


def test_a_use_after_somebody_listed_the_live_tensors_is_our_error():
    run(
        """
        first, t = make(3), make(4)
        donate_buffer(t)
        out = t + 1
        torch_xla.sync()
        torch_xla._XLAC._check_device_tensor_need_materialization(str(torch_xla.device()))
        raises(DonatedBufferError, lambda: t.cpu())
        torch_xla._XLAC._clear_pending_irs(str(torch_xla.device()))
        raises(DonatedBufferError, lambda: t + 1)
        """
    )


def test_a_forked_child_before_the_runtime_starts_can_donate_on_its_own():
    run(
        """
        import os
        child = os.fork()
        if child == 0:
            t = make(8)
            donate_buffer(t)
            out = t + 1
            torch_xla.sync()
            os._exit(0 if is_donated(t) and out.tolist() == list(range(1, 9)) else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        t = make(8)
        donate_buffer(t)
        out = t + 1
        torch_xla.sync()
        assert is_donated(t)
        """
    )


def test_the_registry_survives_a_fork_while_other_threads_use_it():
    run(
        """
        import os
        stop = threading.Event()
        t = make(4)
        donate_buffer(t)
        def ask():
            while not stop.is_set():
                _C.sizes()
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads: thread.start()
        for _ in range(50):
            child = os.fork()
            if child == 0:
                os._exit(0 if _C.sizes()["pending"] == 1 else 1)
            _, status = os.waitpid(child, 0)
            assert status == 0
        stop.set()
        for thread in threads: thread.join()
        cancel_donation(t)
        """
    )


def test_importing_the_package_does_not_start_the_runtime():
    run("assert not torch_xla._XLAC._xla_runtime_is_initialized()")


def test_eager_mode_neither_donates_nor_breaks():
    run(
        """
        torch_xla.experimental.eager_mode(True)
        t = torch.arange(4.0).to("xla")
        donate_buffer(t * 1)
        out = t + 1
        torch_xla.sync(wait=True)
        assert t.tolist() == [0, 1, 2, 3] and out.tolist() == [1, 2, 3, 4]
        """
    )


def test_a_donated_tensor_does_not_stop_dynamo_from_working_on_others():
    run(
        """
        t = make(4)
        donate_buffer(t)
        out = t + 1
        torch_xla.sync()
        compiled = torch.compile(lambda x: x * 2, backend="openxla")
        assert compiled(out).tolist() == [2, 4, 6, 8]
        assert compiled(make(4)).tolist() == [0, 2, 4, 6]
        assert "was donated at" in raises(Exception, lambda: compiled(t))
        assert compiled(out).tolist() == [2, 4, 6, 8]
        """
    )


@pytest.mark.parametrize("marks", [True, False])
def test_what_a_signal_raises_during_a_step_that_donates_reaches_the_program(marks):
    run(
        f"""
        auto_donate(not {marks})
        w = torch.rand(700, 700).to("xla")

        def step(update):
            global w
            old, w = w, update(w)
            if {marks}:
                donate_buffer(old)
            del old
            torch_xla.sync(wait=True)

        def slow(t):
            for _ in range(6):
                t = t @ t / 350
            return t

        for number, error in list(ERRORS.items()) * 2:
            caught, until = None, time.monotonic() + 20
            send_soon(number)
            try:
                while time.monotonic() < until:
                    step(slow)
            except BaseException as found:
                caught = found
            assert type(caught) is error, (number, caught)
            torch_xla.sync(wait=True)
            before = w.cpu()
            for _ in range(3):
                step(lambda t: t * 0.5)
            assert torch.equal(w.cpu(), before / 8)
            outcomes = [donor.outcome for donor in donation_report(steps=3).donors]
            assert outcomes == ["donated"] * 3, outcomes
            assert donation_report().pending == ()
        """,
        before=SIGNALS,
    )


@pytest.mark.parametrize("marks", [True, False])
def test_a_signal_that_is_pending_when_a_step_ends_takes_nothing_away(marks):
    run(
        f"""
        auto_donate(not {marks})
        marker = functools.partial(torch_xla._XLAC._xla_step_marker, "xla:0", [], True)
        p, seen = make(8, 8), []
        for count, (number, error) in enumerate(ERRORS.items(), 1):
            odd = make(3)
            q, old = [p * 1], p
            torch_xla._XLAC._xla_all_reduce_inplace("sum", q, 1.0, [[0]], True)
            p, total = q[0] + 1, odd.sum()
            if {marks}:
                donate_buffer([old, odd])
            xm.add_step_closure(seen.append, args=(count,))
            del q, old
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                assert with_pending(number, marker) is error
                assert not told
                torch_xla.sync()
            # What was to be told is told at the end of the next step, once for the line.
            assert len(told) == ({marks} and count == 1), told
            assert seen == list(range(1, count + 1))
            assert p.tolist() == (torch.arange(64.0).reshape(8, 8) + count).tolist()
            assert odd.tolist() == [0, 1, 2] and total.item() == 3
            donor = donation_report(steps=1).donors[0]
            assert (donor.array, donor.outcome, donor.step) == ("f32[8,8]", "donated", count), donor
        """,
        before=SIGNALS,
    )


def test_a_signal_that_is_pending_at_a_use_after_donation_is_not_lost():
    run(
        """
        t = make(4)
        donate_buffer({"weight": t})
        out = t + 1
        torch_xla.sync()
        for number, error in ERRORS.items():
            assert with_pending(number, functools.partial(torch.Tensor.cpu, t)) is error
            assert "['weight']" in raises(DonatedBufferError, t.cpu)
        assert out.tolist() == [1, 2, 3, 4]
        """,
        before=SIGNALS,
    )


def test_what_is_raised_while_a_warning_is_shown_is_not_taken_for_the_warning():
    run(
        """
        def show(*arguments, **options):
            os.kill(os.getpid(), signal.SIGINT)

        warnings.showwarning = show
        a, b = make(3), make(5)
        donate_buffer(a)
        donate_buffer(b, strict=True)
        total = a.sum() + b.sum()
        try:
            torch_xla.sync(wait=True)
        except KeyboardInterrupt as error:
            assert "f32[5]" in str(error.__cause__), error.__cause__
        else:
            raise AssertionError("the interrupt was lost")
        assert total.item() == 13 and a.tolist() == [0, 1, 2]
        """,
        before=SIGNALS,
    )
