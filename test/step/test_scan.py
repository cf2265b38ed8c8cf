"""scan and scan_layers: what a body donates, and what autograd keeps."""

from __future__ import annotations

import gc
import re
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch_xla
from helpers import Couple, each_backend, pointer
from torch_xla.experimental import scan as host_module
from torch_xla.experimental.scan import scan as host_scan

from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    _host,
    cancel_donation,
    compile,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
    scan,
    scan_layers,
)


def accumulate(carry, x):
    return {"sum": carry["sum"] + x, "same": carry["same"]}, carry["sum"] * x


def donating(carry, x):
    donate_buffer(carry["sum"])
    return accumulate(carry, x)


def arguments(make):
    return {"sum": make(3), "same": make(2)}, make(4, 3)


@pytest.mark.parametrize("is_fn_pure", [False, True])
def test_leaf_donated_by_the_body_is_donated_at_every_call(make, is_fn_pure):
    expected, expected_ys = host_scan(accumulate, *arguments(make))
    for _ in range(3):
        init, xs = arguments(make)
        final, ys = scan(donating, init, xs, is_fn_pure=is_fn_pure)
        torch_xla.sync()
        assert (is_donated(init["sum"]), is_donated(init["same"]), is_donated(xs)) == (True, False, False)
        assert torch.equal(final["sum"].cpu(), expected["sum"].cpu())
        assert torch.equal(final["same"].cpu(), expected["same"].cpu())
        assert torch.equal(ys.cpu(), expected_ys.cpu())
        (donor,) = donation_report(steps=1).donors
        assert (donor.name, donor.outcome) == ("init['sum']", "donated")
        assert "test_scan.py" in donor.where
    with pytest.raises(DonatedBufferError, match=r"init\['sum'\]"):
        init["sum"] + 1


def test_init_and_xs_are_donated_from_outside(make):
    init, xs = arguments(make)
    final, _ = scan(accumulate, init, xs, donate=("init", "xs"))
    torch_xla.sync()
    assert all(map(is_donated, (init["sum"], init["same"], xs)))
    # A leaf that the body returns unchanged keeps its value.
    assert (final["same"].tolist(), final["sum"].tolist()) == ([0, 1], [18, 23, 28])
    for wrong, error in (("ys", ValueError), (("init", "ys"), ValueError), (True, TypeError), ([1], TypeError)):
        with pytest.raises(error, match=f'donate is {re.escape(repr(wrong))}. Pass "init", "xs" or both'):
            scan(accumulate, *arguments(make), donate=wrong)


def multiply(carry, w):
    return carry * w + 1, carry


def differentiate(function, make, sync, **options):
    """Gradients of a loop over weights; the backward pass is a part of the loop's step, or comes after it."""
    weights, init = make(4, 3).requires_grad_(), make(3).requires_grad_()
    final, ys = function(multiply, init, weights, **options)
    if sync:
        torch_xla.sync(wait=True)
    (final.sum() + ys.sum()).backward()
    torch_xla.sync(wait=True)
    return init, weights, [weights.grad.cpu(), init.grad.cpu()]


@pytest.mark.parametrize("sync", [False, True])
def test_tensors_that_the_backward_scan_reads_are_not_donated(make, sync):
    """The gradients are right."""
    _, _, expected = differentiate(host_scan, make, sync)
    with pytest.warns(DonationWarning, match="xs: autograd has saved it for the backward scan"):
        init, weights, found = differentiate(scan, make, sync, donate=("init", "xs"))
    assert (is_donated(init), is_donated(weights)) == (True, False)
    assert all(map(torch.equal, found, expected))
    # The refusal has a separate entry, and so has a backward pass after the loop's step.
    report = donation_report(steps=3 if sync else 2)
    outcomes = {donor.name: (donor.outcome, donor.reason) for donor in report.donors}
    assert outcomes == {"init": ("donated", ""), "xs": ("unusable", "autograd has saved it for the backward scan")}
    with torch.no_grad():
        weights = make(4, 3).requires_grad_()
        _kept = scan(multiply, make(3), weights, donate="xs")
    torch_xla.sync()
    assert is_donated(weights)


def test_slices_that_the_backward_scan_does_not_read_are_donated(make):
    xs = make(4, 3).requires_grad_()
    final, ys = scan(lambda carry, x: (carry + x, carry * 2), make(3), xs, donate="xs")
    torch_xla.sync()
    assert is_donated(xs)
    (final.sum() + ys.sum()).backward()
    assert xs.grad.tolist() == [[7.0] * 3, [5.0] * 3, [3.0] * 3, [1.0] * 3]


@pytest.mark.parametrize("how", ["argument", "body", "environment", "mark"])
def test_strict_donation_of_a_tensor_of_autograd_is_an_error(make, how, monkeypatch):
    """Each time, and the scan donates nothing, also if the tensor had a mark already."""

    def body(carry, w):
        if how == "body":
            donate_buffer(w, strict=True)
        return multiply(carry, w)

    if how == "environment":
        monkeypatch.setenv("TORCH_XLA_DONATE_STRICT", "1")
    options = {"donate": "init" if how == "body" else ("init", "xs"), "strict": how in ("argument", "mark") or None}
    weights, init = make(4, 3).requires_grad_(), make(3)
    for _ in range(2):
        if how == "mark":
            donate_buffer(weights)
        with pytest.raises(DonationError, match="xs: autograd has saved it for the backward scan"):
            scan(body, init, weights, **options)
        (donor,) = donation_report(steps=1).donors
        assert (donor.name, donor.outcome) == ("xs", "unusable")
    assert not donation_report().pending
    torch_xla.sync()
    assert (is_donated(init), is_donated(weights)) == (False, False)


def test_the_report_has_a_tensor_of_autograd_each_time(make):
    """The warning comes once."""
    with pytest.warns(DonationWarning, match="xs: autograd has saved it for the backward scan") as caught:
        for number in (1, 2, 3):
            weights = make(4, 3).requires_grad_()
            final, _ = scan(multiply, make(3), weights, donate="xs")
            torch_xla.sync()
            final.sum().backward()
            donors = donation_report().donors[-number:]  # the backward passes are steps, too
            assert [(donor.name, donor.outcome) for donor in donors] == [("xs", "unusable")] * number
            assert not donation_report()
    assert len(caught) == 1


def test_disabled_donation_does_not_warn_of_a_tensor_of_autograd(make):
    with donation_disabled():
        weights = make(4, 3).requires_grad_()
        _kept = scan(multiply, make(3), weights, donate="xs", strict=True)
    (donor,) = donation_report(steps=1).donors
    assert donor.reason == "donation is disabled (donation_disabled())"
    torch_xla.sync()


def test_in_a_compiled_function_the_strict_error_has_the_result(make):
    weights = make(4, 3).requires_grad_()
    step = compile(lambda init: scan(multiply, init, weights, donate="xs", strict=True)[0])
    with pytest.raises(DonationError, match="xs: autograd has saved it") as raised:
        step(make(3))
    assert torch.equal(raised.value.result.cpu(), host_scan(multiply, make(3), weights)[0].cpu())


@pytest.mark.parametrize(("of_donation", "of_scan"), [(True, False), (None, True)])
def test_strict_of_a_scan_is_the_default_of_its_donations(make, of_donation, of_scan):
    def body(carry, x):
        donate_buffer(x, strict=of_donation)
        return carry + x, carry.sum()

    _kept = scan(body, make(3), make(4, 3), strict=of_scan)
    with pytest.raises(DonationError, match="xs: no output of the step has its size of 48 bytes"):
        torch_xla.sync(wait=True)


@pytest.mark.parametrize("is_fn_pure", [False, True])
def test_cancellations_in_the_body_hold_until_a_later_donation(make, is_fn_pure):
    """A slice donated by the body stands for the whole of xs."""

    def body(carry, x):
        donate_buffer([carry, x])
        cancel_donation([carry, x + 1])
        return carry + x, carry

    def body_that_donates_again(carry, x):
        cancel_donation(carry)
        donate_buffer(carry)
        return carry + x, carry

    for _ in range(2):
        for fn, options, expected in (
            (body, {"donate": "init"}, (False, True)),
            (body_that_donates_again, {}, (True, False)),
        ):
            init, xs = make(3), make(4, 3)
            donate_buffer(init)
            kept = scan(fn, init, xs, is_fn_pure=is_fn_pure, **options)
            torch_xla.sync()
            assert (is_donated(init), is_donated(xs)) == expected
            assert kept[0].tolist() == [18, 23, 28]


def test_an_impossible_donation_is_an_error_and_nothing_is_marked(make):
    def run(*given, **options):
        tried = []

        def body(carry, x):
            tried.append(1)
            donate_buffer([carry, *given], **options)
            return carry + x, carry

        try:
            scan(body, make(3), make(4, 3))
        finally:
            assert tried
            assert not donation_report().pending

    with pytest.raises(TypeError, match=r"tensors\[2\] is of type str, which is neither a tensor nor"):
        run(make(5), "text")
    with pytest.raises(ValueError, match=r"tensors\[1\] is float32.2. on cpu"):
        run(torch.ones(2))
    with pytest.raises(ValueError, match=r"into is given for tensors\[0\], which stands for an argument of scan"):
        run(into=[torch.ones(7)])

    def body(carry, x):
        donate_buffer(carry + 1)
        return carry + x, carry

    with pytest.raises(DonationError, match="which the body of scan has made or sliced"):
        scan(body, make(3), make(2, 3))
    with pytest.raises(DonationError, match="init is float32.3. on xla:0 and has no buffer yet"):
        scan(lambda carry, x: (carry + x, carry), xs=make(2, 3), init=make(3) + 1, donate="init")
    torch_xla.sync()


class Weight(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter, Weight])
def test_tensor_from_outside_is_donated_in_a_body_with_into(make, kind):
    outside, init, xs = torch.Tensor._make_subclass(kind, make(3)), make(3), make(2, 3)
    target = outside * 2

    def body(carry, x):
        donate_buffer(outside, into=target)
        return carry + x, carry

    _kept = scan(body, init, xs)
    torch_xla.sync()
    (donor,) = donation_report(steps=1).donors
    assert (donor.outcome, donor.into_kept) == ("donated", True)


def test_into_may_name_the_final_carry(make):
    init, xs = make(3), make(4, 3)
    before = pointer(init)
    final, _ = scan(lambda carry, x: (carry + x, carry), init, xs)
    donate_buffer(init, into=final)
    torch_xla.sync()
    assert pointer(final) == before


class Slotted:
    """It cannot be weakly referenced."""

    __slots__ = ()

    def __call__(self, carry, x):
        return carry * 2 + x, carry


class Unhashable(Slotted):
    __hash__ = None


@pytest.mark.parametrize("kind", [Unhashable, Slotted])
def test_bodies_without_a_hash_scan_but_not_as_pure_bodies(make, kind):
    expected, expected_ys = host_scan(kind(), make(3), make(4, 3))
    init = make(3)
    final, ys = scan(kind(), init, make(4, 3), donate="init")
    torch_xla.sync()
    assert is_donated(init)
    assert torch.equal(final.cpu(), expected.cpu()) and torch.equal(ys.cpu(), expected_ys.cpu())
    with pytest.raises(TypeError, match=f"fn is of type {kind.__name__}, so the trace of a pure body cannot"):
        scan(kind(), init, make(4, 3), is_fn_pure=True)


def test_a_scan_keeps_no_body_alive(make):
    def run(is_fn_pure):
        def body(carry, x):
            return carry + x, carry

        scan(body, make(3), make(4, 3), is_fn_pure=is_fn_pure)
        torch_xla.sync()
        return weakref.ref(body)

    found = [run(False), run(True)]
    gc.collect()
    assert [reference() for reference in found] == [None, None]


def test_carry_of_a_class_without_keys_is_donated(make):
    def body(carry, x):
        return Couple(carry.first + x, carry.second * 1), carry.first * x

    def giving(carry, x):
        donate_buffer(carry.first)
        return body(carry, x)

    expected = host_scan(body, Couple(make(3), make(2)), make(4, 3))[0].first.tolist()
    for fn, donated in ((body, False), (giving, True)):
        init = Couple(make(3), make(2))
        final, _ = scan(fn, init, make(4, 3))
        torch_xla.sync()
        assert (final.first.tolist(), is_donated(init.first), is_donated(init.second)) == (expected, donated, False)
    assert donation_report(steps=1).donors[0].name == "init[0]"


class Alike:
    def __repr__(self):
        return "alike"


@pytest.mark.parametrize("kind", [lambda: torch.nn.Linear(3, 3), lambda: torch.nn.Parameter(torch.ones(2)), Alike])
def test_keys_that_print_alike_do_not_donate_for_each_other(make, kind):
    first, second = kind(), kind()

    def body(carry, x):
        return {first: carry[first] + x, second: carry[second] * 2}, carry[first] * 1

    def giving(carry, x):
        donate_buffer({second: carry[second], first: carry[first]})
        cancel_donation(carry[second])
        return body(carry, x)

    a, b = make(3), make(5)
    result = scan(giving, {first: a, second: b}, make(4, 3))
    torch_xla.sync()
    assert (is_donated(a), is_donated(b)) == (True, False)
    assert b.tolist() == [0, 1, 2, 3, 4]
    a, b = make(3), make(5)
    result = scan(body, {first: a, second: b}, make(4, 3), donate="init")
    torch_xla.sync()
    assert (is_donated(a), is_donated(b)) == (True, True)
    assert result[0][second].tolist() == [0, 16, 32, 48, 64]


def test_a_body_that_cannot_be_called_is_refused_as_by_torch_xla(make):
    with pytest.raises(ValueError, match="must be callable"):
        host_scan(3, make(3), make(4, 3))
    for is_fn_pure in (False, True):
        with pytest.raises(ValueError, match="fn is 3, which cannot be called. Pass the body of the loop, a function"):
            scan(3, make(3), make(4, 3), is_fn_pure=is_fn_pure)


def test_layers_donate_their_input(make):
    class Layer(torch.nn.Linear):
        donates = False

        def forward(self, x):
            if self.donates:
                donate_buffer(x)
            return super().forward(x)

    layers = [Layer(4, 4).to("xla") for _ in range(3)]
    with torch.no_grad():
        expected = torch.nn.Sequential(*layers)(make(2, 4)).cpu()
        for inside in (False, True):
            Layer.donates = inside
            x = make(2, 4)
            result = scan_layers(layers, x, donate=not inside)
            torch_xla.sync()
            assert is_donated(x)
            assert torch.allclose(result.cpu(), expected, atol=1e-5)


@pytest.mark.parametrize("sync", [False, True])
def test_layers_that_need_gradients_donate_their_input(make, sync):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4).to("xla") for _ in range(3)]
    x = make(2, 4).requires_grad_()
    result = scan_layers(layers, x, donate=True, strict=True)
    if sync:
        torch_xla.sync()
    result.sum().backward()
    torch_xla.sync()
    assert is_donated(x)
    found = [x.grad, *(layer.weight.grad for layer in layers)]
    x = make(2, 4).requires_grad_()
    for layer in layers:
        layer.zero_grad()
    torch.nn.Sequential(*layers)(x).sum().backward()
    expected = [x.grad, *(layer.weight.grad for layer in layers)]
    assert all(torch.allclose(one.cpu(), other.cpu(), atol=1e-5) for one, other in zip(found, expected))


@pytest.mark.parametrize("is_fn_pure", [False, True])
def test_a_scan_in_a_body_is_refused(make, is_fn_pure):
    layer = torch.nn.Linear(3, 3).to("xla")
    inner = {
        "scan": lambda c, x: scan(lambda a, b: (a + b, a), c, x),
        "scan_layers": lambda c, x: (scan_layers([layer, layer], c), c),
    }
    for body in inner.values():
        init = make(3)
        with pytest.raises(NotImplementedError, match=r"is called in the body of a scan.*explain scan"):
            scan(body, init, make(2, 4, 3), donate="init", is_fn_pure=is_fn_pure)
        assert not _C.pending() and init.tolist() == [0, 1, 2]
    assert scan(lambda c, x: (c + x, c), make(3), make(2, 3))[0].tolist() == [3, 6, 9]


def test_the_bodys_own_frame_keeps_its_values_in_an_error(make):
    def body(carry, x):
        mine = 3
        raise RuntimeError(f"a body that fails {mine}")

    with pytest.raises(RuntimeError, match="a body that fails") as raised:
        scan(body, make(3), make(4, 3))
    assert raised.traceback[-1].locals["mine"] == 3
    torch_xla.sync()


def test_an_error_in_a_scan_leaves_what_the_program_handles(make):
    """Such as a generator of torch that has caught an error, and waits."""
    held, names = [], {"__name__": "torch.utils.data"}
    source = """
        def batches(held):
            try:
                raise ValueError("bad batch")
            except ValueError as error:
                held.append(error)
            yield "good batch"
    """

    def fail(carry, x):
        raise RuntimeError("a body that fails")

    exec(textwrap.dedent(source), names)
    waiting = names["batches"](held)
    assert next(waiting) == "good batch" and held[0].__traceback__.tb_frame is waiting.gi_frame
    try:
        raise held[0]
    except ValueError:
        with pytest.raises(RuntimeError, match="a body that fails"):
            scan(fail, make(3), make(4, 3))
    assert waiting.gi_frame is not None


def test_a_thread_waits_with_its_scan_while_another_lowers_one(make, monkeypatch):
    """torch_xla lowers a loop after it has traced the body."""
    bodies, results, reached = [], [], threading.Event()
    lower, own, (init, xs) = host_module._scan_impl_flat, threading.get_ident(), (make(3), make(4, 3))

    def at_the_lock():
        if threading.get_ident() != own:
            reached.set()

    def body(carry, x):
        bodies.append(threading.get_ident())
        if threading.get_ident() != own:
            reached.set()  # without having waited
        return carry + x, carry * 2

    def lower_slowly(*args, **options):
        if threading.get_ident() == own:
            other.start()
            assert reached.wait(100)
            assert set(bodies) == {own}
        return lower(*args, **options)

    lock = mock.Mock(wraps=threading.RLock())
    lock.acquire.side_effect = lambda: at_the_lock() or mock.DEFAULT
    monkeypatch.setattr(_host.loops, "_scanning", lock)
    monkeypatch.setattr(host_module, "_scan_impl_flat", lower_slowly)
    other = threading.Thread(target=lambda: results.append(scan(body, init * 2, xs)))
    results.append(scan(body, init, xs))
    other.join()
    torch_xla.sync()
    assert [final.tolist() for final, _ in results] == [[18, 23, 28], [18, 24, 30]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_scan_that_fails_lets_other_threads_scan(make, error):
    def fails(carry, x):
        raise error

    with pytest.raises(error):
        scan(fails, make(3), make(4, 3))
    with ThreadPoolExecutor(1) as other:
        assert other.submit(_host.loops._scanning.acquire, blocking=False).result()
        other.submit(_host.loops._scanning.release).result()
    assert torch._C._is_multithreading_enabled()
    torch_xla.sync()


def test_a_pure_body_donates_by_the_shapes_of_its_arguments(make):
    def body(carry, x):
        if carry.shape[0] == 5:
            donate_buffer(carry)
        return carry + x, carry.sum()

    for size, donated in ((3, False), (5, True), (3, False), (5, True)):
        init = make(size)
        result = scan(body, init, make(4, size), is_fn_pure=True)
        torch_xla.sync()
        assert is_donated(init) is donated and result[0].shape == init.shape


@each_backend
def test_a_compiled_function_in_the_body_is_a_part_of_it(make, options):
    """It does not donate its arguments."""
    init, xs, weights = make(3), make(4, 3), make(2, 3)
    step = compile(lambda carry, x: (carry + x, carry * 2), donate_argnums=(0, 1), **options)
    final, ys = scan(step, init, xs)
    torch_xla.sync()
    assert not is_donated(init) and not is_donated(xs)
    expected, expected_ys = host_scan(lambda carry, x: (carry + x, carry * 2), init, xs)
    assert torch.equal(final.cpu(), expected.cpu()) and torch.equal(ys.cpu(), expected_ys.cpu())

    class Layer(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(weight.clone())
            self.shift = compile(lambda t: t + 1, donate_argnums=0, **options)

        def forward(self, t):
            return self.shift(t) * self.weight

    layers = [Layer(weight) for weight in weights.cpu()]
    start = init.cpu()
    expected = ((start + 1) * layers[0].weight + 1) * layers[1].weight
    result = scan_layers([layer.to("xla") for layer in layers], init, donate=True)
    torch_xla.sync()
    assert is_donated(init)
    assert torch.allclose(result.cpu(), expected)


def test_a_carry_whose_keys_have_another_order_is_refused(make):
    init = {"a": make(2), "b": make(2) + 1}
    torch_xla.sync()
    with pytest.raises(ValueError, match=r"another order than those of init: \['a'\], \['b'\]. Write the dictionary"):
        scan(lambda c, x: ({"b": c["b"], "a": c["a"] + x}, x), init, make(3, 2))
    carry, _ = scan(lambda c, x: ({"a": c["a"] + x, "b": c["b"] * 1}, c["a"] * 1), init, make(3, 2))
    assert (carry["a"].tolist(), carry["b"].tolist()) == ([6, 10], [1, 2])
