"""compile() with each backend: what a call consumes and what it leaves, its results, and debugging."""

from __future__ import annotations

import functools
import random
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo
import torch_xla
from helpers import (
    BACKENDS,
    UNUSABLE_IGNORED,
    assert_keeps_nothing,
    compiles,
    each_backend,
    each_trace,
    last_reasons,
    pointer,
    whole_copy,
)
from torch.utils import _pytree as pytree
from torch_xla import _XLAC

from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    compile,
    debug_nans,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
)

pytestmark = [*UNUSABLE_IGNORED, pytest.mark.usefixtures("no_graphs_kept")]


# --- What a call consumes ---


@each_backend
def test_a_loop_consumes_its_arguments_and_compiles_once(make, options):
    g = compile(lambda x: x * 2 + 1, donate_argnums=0, **options)
    x = make(8)
    address = pointer(x)
    y = g(x)
    assert pointer(y) == address
    assert y.tolist() == [2 * i + 1 for i in range(8)]
    assert is_donated(x)
    compiled = compiles()
    for _ in range(5):
        given, y = y, g(y)
        assert is_donated(given)
    assert y.tolist() == [64 * i + 63 for i in range(8)]
    g(x := make(8))  # again one that is no result
    assert is_donated(x) and compiles() == compiled
    with pytest.raises(DonatedBufferError, match="test_backends.py"):
        x + 1


@each_backend
def test_pending_work_that_reads_the_argument_runs_first(make, options):
    g = compile(lambda x: x + 1, donate_argnums=0, **options)
    other = make(4) + 7
    for read in (lambda x: x * 5, lambda x: x.view(3, 1) * 5, lambda x: x[1:] * 5, lambda x: x.detach() * 5) * 2:
        x = make(3)
        pending = read(x)
        assert g(x).tolist() == [1, 2, 3]
        assert pending.flatten().tolist() in ([0, 5, 10], [5, 10])
        assert is_donated(x)
    assert other.tolist() == [7, 8, 9, 10]
    x = make(3) * 2  # pending itself
    assert g(x).tolist() == [1, 3, 5]
    assert is_donated(x)


@each_backend
def test_an_argument_that_is_also_marked_by_hand_is_donated_by_the_call(make, options):
    """Although pending work reads it, whose output is too small for its memory."""
    g = compile(lambda x: x + 1, donate_argnums=0, **options)
    for _ in range(2):
        x = make(3)
        donate_buffer(x, strict="off")
        pending = x[1:] * 5
        assert g(x).tolist() == [1, 2, 3]
        assert pending.tolist() == [5, 10]
        assert is_donated(x)


@each_backend
def test_a_module_is_given_away_with_its_parameters(make, options):
    def update(module, x):
        return [p.detach() - 0.1 * x.sum() for p in module.parameters()]

    g, x = compile(update, donate_argnums=0, **options), make(2, 3)
    for _ in range(2):
        module = torch.nn.Linear(3, 3).to("xla")
        torch_xla.sync()
        expected = [t.cpu() for t in update(module, x)]
        assert all(torch.allclose(a.cpu(), b) for a, b in zip(g(module, x), expected))
        assert all(is_donated(p) for p in module.parameters())


class Callable:
    def __call__(self, x):
        return x * 3

    def method(self, x):
        return x * 3


class Module(torch.nn.Module):
    def forward(self, x):
        return x * 3


def looping(x):
    for _ in range(2):
        x = x * 1
    return x * 3


@each_backend
def test_every_kind_of_callable_donates(make, options):
    functions = [torch.no_grad()(lambda x: x * 3), Callable(), Callable().method, Module(), Module().forward, looping]
    for f in (*functions, lambda x: (lambda y: y * 3)(x), functools.partial(torch.mul, other=3)):
        x = make(3)
        assert compile(f, donate_argnums=0, **options)(x).tolist() == [0, 3, 6], f
        assert is_donated(x), (f, last_reasons())
    assert compile(torch.neg, donate_argnums=0, **options)(make(3)).tolist() == [0, -1, -2]


@each_backend
def test_calls_from_several_threads_in_turn(make, options):
    g, lock = compile(lambda x: x + 1, donate_argnums=0, **options), threading.Lock()
    g(make(3))

    def run(_):
        for _ in range(5):
            with lock:
                x = make(3)
                assert g(x).tolist() == [1, 2, 3]
                assert is_donated(x)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    assert _XLAC._get_allow_execution()


@each_trace
def test_a_graph_keeps_no_argument_alive(options):
    """The registry stays flat."""
    assert_keeps_nothing(compile(lambda x, y: x + y, donate_argnums=0, **options))


# --- What it does not consume ---


@each_backend
def test_a_cached_constant_is_never_destroyed(make, options):
    g = compile(lambda s, x: (s + 1, x + s), donate_argnums=0, **options)
    for value in (42.0, 43.0, 42.0):
        s = torch.tensor(value, device="xla")
        total, moved = g(s, make(3))
        assert (total.item(), s.item()) == (value + 1, value)
        assert moved.tolist() == [value, value + 1, value + 2]
    assert torch.tensor(42.0, device="xla").item() == 42
    assert last_reasons() == ["torch_xla shares this buffer between tensors (a cached constant)"]


@each_backend
def test_a_buffer_that_another_tensor_holds_is_kept(make, options):
    """After target.copy_(online) torch_xla keeps one buffer for both, although the program has made no alias."""
    step = compile(lambda target, online: target + online, donate_argnums=0, **options)
    for other_is_argument in (True, False):
        target = make(3)
        other = whole_copy(target)
        assert step(target, other if other_is_argument else make(3)).tolist() == [0, 2, 4]
        assert target.tolist() == other.tolist() == [0, 1, 2]
        assert "another live tensor" in last_reasons()[0]


@each_backend
def test_aliases_and_copies_passed_twice_are_one_donor(make, options):
    g = compile(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1), **options)
    for partner in (whole_copy, lambda a: a, lambda a: a.detach(), lambda a: make(4), whole_copy):
        a = make(4)
        more, double = g(a, partner(a))
        assert (more.tolist(), double.tolist()) == ([1, 2, 3, 4], [0, 2, 4, 6])
        assert is_donated(a)
    with pytest.raises(ValueError, match="is donated, and .* has the same buffer"):
        compile(lambda a, b: a + b, donate_argnums=0, **options)(a := make(4), a.detach())


@each_backend
def test_dlpack_views_keep_their_memory(make, options):
    from torch_xla.utils import dlpack

    g = compile(lambda x: x * 2, donate_argnums=0, **options)
    g(make(1024))
    t = make(1024)
    seen = torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(t))
    before = seen.clone()
    assert torch.equal(g(t).cpu(), before * 2)
    assert torch.equal(seen, before)
    assert not is_donated(t)


@each_backend
def test_strict_raises_with_the_result(make, options):
    g, x = compile(lambda x: x.sum(), donate_argnums=0, strict=True, **options), make(3)
    with pytest.raises(DonationError, match="not usable") as raised:  # noqa: PT012
        for _ in range(2):  # until it is told
            g(x)
            _C.wait_for_steps()
    assert raised.value.result.item() == 3
    assert x.tolist() == [0, 1, 2]


@each_backend
def test_an_error_takes_the_marks_back_and_loses_nothing(make, options):
    def f(x):
        raise KeyError("boom")

    x, pending = make(3, 2), make(3) + 7
    with pytest.raises(Exception, match="boom"):
        compile(f, donate_argnums=0, **options)(x)
    # An error of torch: torch_xla 2.8 ends the process for an operation that XLA refuses.
    g = compile(lambda x: (x + 1).reshape(4), donate_argnums=0, **options)
    with pytest.raises(Exception, match="invalid for input of size 6"):
        g(x)
    assert _C.pending() == []
    assert (x.tolist(), pending.tolist()) == ([[0, 1], [2, 3], [4, 5]], [7, 8, 9])
    x = make(2, 2)
    assert g(x).tolist() == [1, 2, 3, 4]
    assert is_donated(x)


@each_backend
def test_a_nested_call_donates_nothing_of_its_own(make, options):
    """It is a part of the outer call, which may donate an argument of both."""
    inner = compile(lambda x: x + 1, donate_argnums=0, **options)

    def both(x, y):
        return inner(x) + inner(y) + x

    outers = [(compile(both, donate_argnums=1, **options), True), (compile(both), False)]
    if options == BACKENDS["openxla"]:
        outers.append((torch.compile(both, backend="openxla"), False))
    for outer, donates in outers:
        x, y = make(3), make(3)
        assert outer(x, y).tolist() == [2, 5, 8]
        assert (is_donated(x), is_donated(y)) == (False, donates)


@each_backend
def test_donation_disabled_and_marks_of_donate_buffer(make, options):
    g = compile(lambda x: x + 1, donate_argnums=0, **options)
    for _ in range(2):
        x = make(3)
        with donation_disabled():
            assert g(x).tolist() == [1, 2, 3]
        assert not is_donated(x)
        donate_buffer(x)
        assert g(x).tolist() == [1, 2, 3]
        assert is_donated(x)
        assert _C.pending() == []


@each_backend
def test_a_backward_pass_after_the_donation_names_it(make, options):
    """It never gives a wrong gradient."""
    w = make(3).requires_grad_()
    y = (w * w).sum()
    torch_xla.sync()
    assert compile(lambda x: x.detach() * 2, donate_argnums=0, **options)(w).tolist() == [0, 2, 4]
    assert is_donated(w)
    with pytest.raises(DonatedBufferError, match=r"f32\[3\] tensor .*was donated at"):
        y.backward()
    assert w.grad is None


# --- Results ---

RESULTS = {
    "x": lambda x: x,
    "x and x + 1": lambda x: (x, x + 1),
    "detach": lambda x: x.detach(),
    "view": lambda x: x.view(-1),
    "clone": lambda x: x.clone(),
    "new dimension": lambda x: (x[None], x + 1),
    "pytree": lambda x: {"a": x.view(-1), "b": (x.view(2, 2), [x.reshape(2, 2), x])},
    "contiguous": lambda x: x.contiguous(),
    "slice": lambda x: x[1:],
    "views": lambda x: (x, x.detach(), x.flip(0)),
    "one result twice": lambda x: (x + 1,) * 2,
    "aliases of a result": lambda x: (lambda y: (y, y.detach(), y.clone()))(x + 1),
    "clone updated": lambda x: (lambda y: y.add_(1))(x.clone()),
    "constants": lambda x: (1, "a", x.shape, None),
    "none": lambda x: None,
    "array and shape": lambda x: (torch.zeros(4, device=x.device), x.shape),
}


@each_backend
def test_results_are_valid_at_every_call(options):
    for name, f in RESULTS.items():
        for function in (f, lambda x, f=f: (f(x), x * 2)):
            if name == "detach" and function is f and options == BACKENDS["openxla"]:
                continue  # torch.compile alone fails: its graph computes nothing
            torch._dynamo.reset()
            g = compile(function, donate_argnums=0, **options)
            for offset in (0, 5, 9):
                x = torch.arange(4.0).to("xla") + offset
                torch_xla.sync()
                found, expected = (pytree.tree_leaves(tree) for tree in (g(x), function(torch.arange(4.0) + offset)))
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a.cpu(), b) if isinstance(b, torch.Tensor) else a == b, name


OPERATIONS = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "clone": lambda a, b: a.clone(),
    "view": lambda a, b: a.view(2, 2).t().reshape(4),
    "detach": lambda a, b: a.detach(),
    "relu": lambda a, b: torch.relu(a),
    "where": lambda a, b: torch.where(a > b, a, b),
}


@each_backend
def test_random_functions_compute_what_plain_torch_computes(options):
    consumed = 0
    for seed in range(20):
        torch._dynamo.reset()
        rnd = random.Random(seed)
        torch.manual_seed(seed)
        count = rnd.randint(1, 4)
        program = [(rnd.choice([*OPERATIONS]), rnd.randrange(9), rnd.randrange(9)) for _ in range(rnd.randint(1, 6))]
        outputs = rnd.randint(1, 3)
        donated = tuple(i for i in range(count) if rnd.random() < 0.8)
        captured = torch.arange(4.0) - 1
        on_device = captured.to("xla")
        torch_xla.sync()

        def body(closed, arguments, program=program, outputs=outputs):
            values = [*arguments, closed]
            for name, i, j in program:
                values.append(OPERATIONS[name](values[i % len(values)], values[j % len(values)]))
            return values[-outputs:]

        g = compile(lambda *a, body=body, w=on_device: body(w, a), donate_argnums=donated, **options)
        for _ in range(3):
            host = [torch.randn(4) for _ in range(count)]
            device = [t.to("xla") for t in host]
            torch_xla.sync()
            for a, b in zip(g(*device), body(captured, host), strict=True):
                assert torch.allclose(a.cpu(), b, atol=1e-4), seed
            consumed += sum(map(is_donated, device))
            assert all(i in donated or torch.equal(t.cpu(), host[i]) for i, t in enumerate(device)), seed
            assert torch.equal(on_device.cpu(), captured), seed
    assert consumed >= 20


# --- With donation disabled ---


@each_backend
def test_disabled_donation_warns_of_uses_only_when_asked(make, options):
    """At the line of the use. It ends with its context."""
    step = compile(lambda x, y: x + y, donate_argnums=0, **options)
    x, y = make(3), make(3)
    with donation_disabled(report_reuse=True):
        result = step(x, y)
        with pytest.warns(DonationWarning, match=r"f32\[3\] tensor 'x \(argument 0 of <lambda>\)' is used after"):
            assert (x + 1).tolist() == [1, 2, 3]
        assert (y + 1).tolist() == [1, 2, 3]
    assert result.tolist() == [0, 2, 4] and not is_donated(x)
    (donor,) = donation_report(steps=1).donors
    assert (donor.outcome, donor.reason) == ("unusable", "donation is disabled (donation_disabled())")
    x = make(3)
    with warnings.catch_warnings(), donation_disabled():
        warnings.simplefilter("error")
        step(x, y)
        assert (x + 1).tolist() == [1, 2, 3]
    torch_xla.sync()
    assert step(x, y).tolist() == [0, 2, 4] and is_donated(x)


@each_backend
def test_a_use_inside_a_compiled_function_warns_at_its_call(make, options):
    step, again = compile(lambda x: x + 1, donate_argnums=0, **options), compile(lambda x: x * 2, **options)
    x = make(3)
    with donation_disabled(report_reuse=True):
        _kept = step(x)
        with pytest.warns(DonationWarning) as caught:
            again(x)
    assert {warning.filename for warning in caught} == {__file__}


@each_backend
def test_a_nan_is_found_at_the_calls_end_and_arguments_live(make, options):
    step = compile(lambda x: (x / x, x + 1), donate_argnums=0, **options)
    x = make(3)
    with debug_nans(), pytest.raises(FloatingPointError, match=r"f32\[3\]: 1 NaN of 3 values"):
        step(x)
    assert x.tolist() == [0, 1, 2]
    assert not _XLAC._get_use_eager_mode() and _XLAC._get_allow_execution()
    assert torch.equal(step(x + 1)[1].cpu(), torch.tensor([2.0, 3.0, 4.0]))


@each_backend
def test_a_pending_clone_is_an_argument_of_its_own(make, options):
    step = compile(lambda x, y: x + y, donate_argnums=0, **options)
    x = make(3)
    clone = x.clone()
    result = step(x, clone)
    assert is_donated(x) and result.tolist() == [0, 2, 4] and clone.tolist() == [0, 1, 2]
    y = make(3)
    result = step(y.clone(), y)
    assert not is_donated(y) and result.tolist() == [0, 2, 4] and y.tolist() == [0, 1, 2]
