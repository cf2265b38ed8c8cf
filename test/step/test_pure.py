"""compile(pure=True): traced once for each signature and replayed; what it sees, refuses and gives away."""

from __future__ import annotations

import functools
import math
import random
import re
import threading

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from children import in_process
from helpers import assert_keeps_nothing, pointer
from torch.func import functional_call
from torch_xla import _XLAC

import torch_xla_donate
from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    _host,
    cancel_donation,
    donate_buffer,
    donation_disabled,
    donation_report,
    gradient_accumulation,
    hlo,
    is_donated,
    scan,
    scan_layers,
)

pytestmark = pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")


@pytest.fixture(autouse=True)
def _notices_taken_and_host_as_before():
    yield
    _C.wait_for_steps()
    _C.take_notices()
    assert _XLAC._get_allow_execution()
    assert not _XLAC._get_use_eager_mode()


def pure(f, **options):
    return torch_xla_donate.compile(f, pure=True, **options)


def give_away(f, **options):
    return pure(f, donate_argnums=0, **options)


def whole_copy(t):
    """Another tensor that shares the buffer."""
    copy = torch.empty_like(t)
    copy.copy_(t)
    torch_xla.sync(wait=True)
    assert pointer(copy) == pointer(t)
    return copy


def last_reasons():
    return [donor.reason for donor in donation_report(steps=1).donors]


# --- Replays ---


def test_a_loop_consumes_its_arguments_and_compiles_once(make):
    traces = []

    def f(x):
        traces.append(1)
        return x * 2 + 1

    g = give_away(f)
    x = make(8)
    address = pointer(x)
    y = g(x)
    assert pointer(y) == address
    assert y.tolist() == [2 * i + 1 for i in range(8)]
    assert is_donated(x)
    compiled = metrics.counter_value("UncachedCompile")
    for _ in range(5):
        y = g(y)
    assert metrics.counter_value("UncachedCompile") == compiled
    assert traces == [1]
    with pytest.raises(DonatedBufferError, match="test_pure.py"):
        x + 1


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8, torch.bool, torch.complex64]
)
def test_any_dtype_is_donated_at_every_call(make, dtype):
    g = give_away(lambda x: x.logical_not() if dtype is torch.bool else x + x)
    for _ in range(2):
        x = make(6, dtype=dtype)
        address = pointer(x)
        y = g(x)
        assert pointer(y) == address
        assert y.dtype is dtype


def test_tensors_without_elements_do_no_harm(make):
    g = give_away(lambda x: x + x)
    for shape in ((0,), (0,), (2, 0, 3)):
        assert g(make(*shape)).shape == shape


def test_static_numbers_are_told_apart_by_type_and_sign(make):
    """Not a number is one number."""
    g = pure(lambda x, s: x * s, static_argnums=1)
    x = make(3) + 1
    assert str(g(x, 0.0).tolist()) == "[0.0, 0.0, 0.0]"
    assert str(g(x, -0.0).tolist()) == "[-0.0, -0.0, -0.0]"
    assert g(x, 1).dtype is torch.float32
    before = len(g._programs)
    g(x, float("nan"))
    g(x, float("nan"))
    assert len(g._programs) == before + 1


def test_numbers_in_static_tuples_are_told_apart_too(make):
    g = pure(lambda x, s: x * s[0], static_argnums=1)
    x = make(3, dtype=torch.int32) + 1
    assert g(x, (2,)).dtype is torch.int32
    assert g(x, (2.0,)).dtype is torch.float32
    assert str(g(x, (0.0,)).tolist()) == "[0.0, 0.0, 0.0]"
    assert str(g(x, (-0.0,)).tolist()) == "[-0.0, -0.0, -0.0]"


def test_complex_numbers_are_told_apart_by_their_signs(make):
    g = pure(lambda x, c: x * math.atan2(c.imag, -3))
    x = make(2) + 1
    assert g(x, complex(1, 0.0)).tolist()[0] > 3
    assert g(x, complex(1, -0.0)).tolist()[0] < -3


def test_random_numbers_go_on_as_from_step_to_step(make):
    def f(x):
        return torch.nn.functional.dropout(x, 0.5) + torch.rand(4, device="xla")

    g, x = pure(f), make(4)
    torch_xla.manual_seed(3)
    replayed = [g(x).tolist() for _ in range(4)]
    torch_xla.manual_seed(3)
    stepped = []
    for _ in range(4):
        y = f(x)
        torch_xla.sync()
        stepped.append(y.tolist())
    assert replayed == stepped
    assert len({str(numbers) for numbers in replayed}) == 4


def test_a_replay_does_not_draw_the_numbers_of_what_is_pending(make):
    g, x = pure(lambda x: x * 0 + torch.rand(4, device="xla")), make(4)
    g(x)
    drawn = []
    for _ in range(2):
        pending = torch.rand(4, device="xla")
        drawn += [g(x), pending]
    assert len({str(t.tolist()) for t in drawn}) == 4


def test_a_graph_that_fell_out_of_the_cache_is_compiled_again(make, monkeypatch):
    g = give_away(lambda x: x + 1)
    y = g(make(3))
    run, calls = _host.run_graph, []

    def dropped_once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("Failed to get computation by hash 1. Maybe the entry get kicked out of the LRU cache")
        return run(*args)

    monkeypatch.setattr(_host, "run_graph", dropped_once)
    z = g(y)
    assert z.tolist() == [2, 3, 4]
    assert is_donated(y)


def test_eager_mode_and_inference_mode_are_borne_and_kept(make):
    g = give_away(lambda x: x + 1)
    with torch_xla.experimental.eager_mode_context(True):
        x = make(3)
        assert g(g(x)).tolist() == [2, 3, 4]
        assert _XLAC._get_use_eager_mode()
        assert is_donated(x)
    with torch.inference_mode():
        assert g(make(3)).tolist() == [1, 2, 3]
    assert g(make(3)).tolist() == [1, 2, 3]


def test_calls_from_several_threads_in_turn(make):
    g, lock, errors = give_away(lambda x: x + 1), threading.Lock(), []

    def run():
        try:
            for _ in range(5):
                with lock:
                    x = make(3)
                    assert g(x).tolist() == [1, 2, 3]
                    assert is_donated(x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# --- What the function closes over ---


def test_updates_of_a_captured_parameter_are_seen(make):
    w = torch.nn.Parameter(make(4))
    optimizer = torch.optim.SGD([w], lr=1.0)
    g = pure(lambda x: x + w.detach())
    x = make(4) * 0
    assert g(x).tolist() == [0, 1, 2, 3]
    with torch.no_grad():
        w.add_(1)
    assert g(x).tolist() == [1, 2, 3, 4]
    w.data = make(4) * 10
    assert g(x).tolist() == [0, 10, 20, 30]
    w.grad = torch.ones(4, device="xla")
    optimizer.step()
    assert g(x).tolist() == [-1, 9, 19, 29]
    assert len(g._programs) == 1


def test_an_argument_that_is_also_captured_does_not_stand_for_it(make):
    w = make(4)
    g = pure(lambda x: x + w)
    assert g(w).tolist() == [0, 2, 4, 6]
    assert g(make(4) + 10).tolist() == [10, 12, 14, 16]


def test_a_captured_tensor_is_no_argument_that_shares_its_buffer(make):
    """An argument that shares its buffer with a captured tensor does not stand for it."""
    w = make(4)
    g = pure(lambda x: x + w)
    assert g(whole_copy(w)).tolist() == [0, 2, 4, 6]
    assert g(make(4) + 10).tolist() == [10, 12, 14, 16]


def test_captured_tensors_that_share_a_buffer_part_ways(make):
    w = make(4)
    average = whole_copy(w)
    g = pure(lambda x: x + w * 10 + average)
    x = make(4)
    assert g(x).tolist() == [0, 12, 24, 36]
    w.copy_(make(4) + 1)
    assert g(x).tolist() == [10, 22, 34, 46]


def test_a_cached_constant_is_no_argument_and_no_captured_tensor(make):
    x = make(3)
    g = pure(lambda s, x: s * x + torch.tensor(42.0, device="xla"))
    assert g(torch.tensor(42.0, device="xla"), x).tolist() == [42, 84, 126]
    assert g(torch.tensor(7.0, device="xla"), x).tolist() == [42, 49, 56]
    w = torch.tensor(5.0, device="xla")
    h = pure(lambda x: x * w + torch.tensor(5.0, device="xla"))
    assert h(x).tolist() == [5, 10, 15]
    w.add_(1)
    assert h(x).tolist() == [5, 11, 17]
    assert torch.tensor(5.0, device="xla").item() == 5


def test_a_captured_view_follows_its_base(make):
    base = make(2, 3)
    row = base[1]
    base.add_(1)
    torch_xla.sync()
    g = pure(lambda x: x + row)
    assert g(make(3)).tolist() == [4, 6, 8]
    base.add_(1)
    assert g(make(3)).tolist() == [5, 7, 9]
    base[1, 0] = 100
    assert g(make(3)).tolist()[0] == 100


def test_train_and_eval_of_the_modules_called_are_seen(make):
    layer = torch.nn.Dropout(0.5)
    x = make(64) + 1
    for g in (pure(lambda x: layer(x)), pure(layer)):
        layer.train()
        assert (g(x) == 0).any().item()
        layer.eval()
        assert not (g(x) == 0).any().item()


def test_another_module_at_the_same_address_is_another_module(make):
    class Scale(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

    g, x = pure(lambda module, x: x * module.factor), make(3)
    for factor in range(1, 30):
        assert g(Scale(factor), x).tolist() == [0, factor, 2 * factor]


def test_a_captured_or_kept_tensor_donated_elsewhere_is_named(make):
    w = make(4)
    g, h = pure(lambda x: x + w), give_away(lambda x, y: x + y)
    g(make(4))
    h(make(4), make(4))
    donate_buffer(w)
    _ = w + 1
    torch_xla.sync()
    x = make(4)
    with pytest.raises(DonatedBufferError, match="was donated at"):
        g(x)
    with pytest.raises(DonatedBufferError, match="was donated at"):
        h(x, w)
    assert x.tolist() == [0, 1, 2, 3]
    assert not is_donated(x)


# --- What is not given away ---


@pytest.mark.parametrize("first", [True, False])
def test_an_argument_that_the_function_closes_over_too_stays(make, first):
    w = make(4)
    g = give_away(lambda x: x + w)
    if not first:
        g(make(4))
    assert g(w).tolist() == [0, 2, 4, 6]
    assert not is_donated(w)
    assert last_reasons() == ["the function also closes over it"]
    assert g(make(4)).tolist() == [0, 2, 4, 6]


def test_a_cached_constant_is_never_destroyed(make):
    g = give_away(lambda s, x: (s + 1, x + s))
    for value in (42.0, 43.0, 42.0):
        s = torch.tensor(value, device="xla")
        total, moved = g(s, make(3))
        assert (total.item(), s.item()) == (value + 1, value)
        assert moved.tolist() == [value, value + 1, value + 2]
    assert torch.tensor(42.0, device="xla").item() == 42
    assert last_reasons() == ["torch_xla shares this buffer between tensors (a cached constant)"]


def test_an_unread_argument_stays_and_the_report_says_so(make):
    g = pure(lambda x, y: x + 1, donate_argnums=(0, 1))
    y = make(5)
    g(make(3), y)
    assert y.tolist() == [0, 1, 2, 3, 4]
    assert "not read by the step" in last_reasons()


def test_a_buffer_that_an_unoffered_tensor_holds_stays(make):
    g = give_away(lambda x: x + 1)
    x = make(3)
    other = whole_copy(x)
    assert g(x).tolist() == [1, 2, 3]
    assert other.tolist() == x.tolist() == [0, 1, 2]


def test_aliases_and_copies_passed_twice(make):
    g = pure(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1))
    for partner in (lambda a: a, lambda a: a.detach(), whole_copy, lambda a: make(4)):
        a = make(4)
        more, double = g(a, partner(a))
        assert (more.tolist(), double.tolist()) == ([1, 2, 3, 4], [0, 2, 4, 6])
        assert is_donated(a)
    with pytest.raises(ValueError, match="is donated, and .* has the same buffer"):
        give_away(lambda a, b: a + b)(a := make(4), a.detach())


def test_pending_work_that_reads_the_argument_runs_first(make):
    g = give_away(lambda x: x + 1)
    for read in (lambda x: x * 5, lambda x: x.view(3, 1) * 5, lambda x: x[1:] * 5, lambda x: x.detach() * 5):
        x = make(3)
        pending = read(x)
        assert g(x).tolist() == [1, 2, 3]
        assert pending.flatten().tolist() in ([0, 5, 10], [5, 10])
        assert is_donated(x)
    x = make(3) * 2  # pending itself
    assert g(x).tolist() == [1, 3, 5]
    assert is_donated(x)


def test_dlpack_views_keep_their_memory(make):
    from torch_xla.utils import dlpack

    g = give_away(lambda x: x * 2)
    g(make(1024))
    t = make(1024)
    seen = torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(t))
    before = seen.clone()
    assert torch.equal(g(t).cpu(), before * 2)
    assert torch.equal(seen, before)
    assert not is_donated(t)


def test_a_backward_pass_after_the_donation_names_it(make):
    w = make(3).requires_grad_()
    y = (w * w).sum()
    torch_xla.sync()
    assert give_away(lambda x: x.detach() * 2)(w).tolist() == [0, 2, 4]
    with pytest.raises(DonatedBufferError, match="was donated at"):
        y.backward()


def test_donation_disabled_and_marks_of_donate_buffer(make):
    g = give_away(lambda x: x + 1)
    x = make(3)
    with donation_disabled():
        assert g(x).tolist() == [1, 2, 3]
    assert not is_donated(x)
    donate_buffer(x)
    assert g(x).tolist() == [1, 2, 3]
    assert is_donated(x)
    assert _C.pending() == []


def test_strict_raises_with_the_result(make):
    g = give_away(lambda x: x.sum(), strict=True)
    x = make(3)

    def call_until_told():
        for _ in range(2):
            g(x)
            _C.wait_for_steps()

    with pytest.raises(DonationError, match="not usable") as raised:
        call_until_told()
    assert raised.value.result.item() == 3
    assert x.tolist() == [0, 1, 2]


def test_an_error_inside_takes_the_marks_back_and_loses_nothing(make):
    kept = []

    def f(x):
        kept.append(x * 2)
        raise KeyError("boom")

    x, pending = make(3), make(3) + 7
    with pytest.raises(KeyError, match="boom"):
        give_away(f)(x)
    assert _C.pending() == []
    assert (x.tolist(), pending.tolist(), kept[0].tolist()) == ([0, 1, 2], [7, 8, 9], [0, 2, 4])


def test_a_nested_call_is_a_part_of_the_outer_one(make):
    inner = give_away(lambda x: x + 1)
    for outer in (pure(lambda x: (inner(x), x * 2)), torch_xla_donate.compile(lambda x: (inner(x), x * 2))):
        x = make(3)
        assert outer(x)[0].tolist() == [1, 2, 3]
        assert not is_donated(x)


# --- Results ---


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.detach(),
        lambda x: x.view(-1),
        lambda x: x.clone(),
        lambda x: x[None],
        lambda x: [x.reshape(2, 2), {"a": x}],
        lambda x: x.contiguous(),
        lambda x: x[1:],
        lambda x: (x, x.detach(), x.flip(0)),
        lambda x: (x + 1,) * 2,
        lambda x: (lambda y: (y, y.detach(), y.clone()))(x + 1),
        lambda x: (1, "a", x.shape, None),
        lambda x: None,
        lambda x: (lambda y: y.add_(1))(x.clone()),
    ],
)
def test_results_are_valid_at_every_call(make, f):
    g = give_away(f)
    for offset in (0, 5, 9):
        x = make(4) + offset
        torch_xla.sync()
        found, expected = g(x), f(torch.arange(4.0) + offset)
        for a, b in zip(*(torch.utils._pytree.tree_leaves(tree) for tree in (found, expected))):
            assert torch.equal(a.cpu(), b) if isinstance(b, torch.Tensor) else a == b


def test_constants_are_new_at_every_call(make):
    g = give_away(lambda x: (torch.zeros(3, device="xla"), torch.tensor(42.0, device="xla"), torch.ones(2)))
    consume = pure(lambda a, b: (a + 1, b + 1), donate_argnums=(0, 1))
    for _ in range(3):
        zeros, constant, on_host = g(make(3))
        assert (zeros.tolist(), constant.item(), on_host.tolist()) == ([0, 0, 0], 42, [1, 1])
        on_host.add_(1)
        consume(zeros, constant)
        assert is_donated(zeros)
    assert torch.tensor(42.0, device="xla").item() == 42


def test_captured_tensors_are_returned_as_they_are_now(make):
    w = torch.nn.Parameter(make(3))
    g = pure(lambda x: (x, w, w.detach()))
    with torch.no_grad():
        for value in (make(3), make(3) + 4):
            w.data = value
            _, same, detached = g(make(3))
            assert same is w
            assert detached.tolist() == w.tolist()
            assert not detached.requires_grad


def test_requires_grad_and_parameters_come_back(make):
    g = pure(lambda x: (torch.nn.Parameter(x + 1), (x * 2).detach().requires_grad_()))
    for _ in range(2):
        parameter, leaf = g(make(3))
        assert isinstance(parameter, torch.nn.Parameter)
        (parameter * leaf).sum().backward()
        assert parameter.grad.tolist() == [0, 2, 4]


def test_detached_and_returned_arguments(make):
    """A detached argument is detached, and a returned one is the same object."""
    g = give_away(lambda x: (x, x.detach()))
    x = make(3).requires_grad_()
    for argument in (x, x * 1.0):
        same, detached = g(argument)
        assert same is argument
        assert not detached.requires_grad
        assert not is_donated(argument)


# --- Autograd ---


def test_training_inside_computes_what_plain_torch_computes(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    inputs, targets = torch.randn(16, 4), torch.randn(16, 1)

    def loss_of(p, x, y):
        return ((functional_call(model, p, (x,)) - y) ** 2).mean()

    def by_grad(p, x, y):
        p = {name: value.detach().requires_grad_() for name, value in p.items()}
        loss = loss_of(p, x, y)
        gradients = torch.autograd.grad(loss, list(p.values()))
        return {name: (v - 0.1 * g).detach() for (name, v), g in zip(p.items(), gradients)}, loss.detach()

    def by_backward(p, x, y):
        p = {name: value.detach().requires_grad_() for name, value in p.items()}
        loss = loss_of(p, x, y)
        loss.backward()
        return {name: (v - 0.1 * v.grad).detach() for name, v in p.items()}, loss.detach()

    def by_functorch(p, x, y):
        gradients, loss = torch.func.grad_and_value(loss_of)(p, x, y)
        return {name: v - 0.1 * gradients[name] for name, v in p.items()}, loss

    for step in (by_grad, by_backward, by_functorch):
        g, expected = give_away(step), dict(start)
        state = {name: value.to("xla") for name, value in start.items()}
        x, y = inputs.to("xla"), targets.to("xla")
        for _ in range(4):
            old = state
            state, loss = g(state, x, y)
            expected, expected_loss = by_grad(expected, inputs, targets)
            assert all(is_donated(value) for value in old.values())
            assert torch.allclose(loss.cpu(), expected_loss, atol=1e-4)
        assert len(g._programs) == 1


def test_a_result_with_a_gradient_history_is_refused(make):
    g, x = pure(lambda x: x * 2), make(3).requires_grad_()
    with pytest.raises(DonationError, match="gradient history"):
        g(x)
    with torch.no_grad():
        assert g(x).tolist() == [0, 2, 4]


# --- Refusals ---


def line(text):
    """The message of a refusal that names a line of this file."""
    return pytest.raises(DonationError, match=rf"at \S*test_pure.py:\d+ it {text}")


@pytest.mark.parametrize(
    "update",
    [
        lambda x: x.add_(1),
        lambda x: x.__setitem__(0, 5),
        lambda x: x.view(4).mul_(2),
        lambda x: x.chunk(2)[0].add_(1),
        lambda x: x.detach().add_(1),
        lambda x: setattr(x, "data", x + 1),
        lambda x: torch._foreach_add_([x], 1),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch.ops.aten.add_.Tensor(x, x),
        lambda x: x.copy_(x + 1),
    ],
)
@pytest.mark.parametrize("captured", [False, True])
def test_updates_of_what_is_outside_are_refused_at_their_line(make, update, captured):
    w = make(4)

    def f(x):
        update(w if captured else x)
        return x * 2

    x = make(4)
    with line("updates (an argument|a tensor) from outside"):
        give_away(f)(x)
    assert x.tolist() == w.tolist() == [0, 1, 2, 3]
    assert not is_donated(x)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: print(x),
        lambda x: f"{x}",
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: torch.histc(x, 4, 0, 10),
        lambda x: torch.empty(3).copy_(x),
        lambda x: x[: x[1].long()],
        lambda x: x.numpy(force=True),
        lambda x: xm.save({"x": x}, "/dev/null"),
    ],
)
def test_reads_on_the_host_are_refused(make, read):
    def f(x):
        read(x)
        return x + 1

    x = make(3)
    with pytest.raises(DonationError, match="is declared pure, but at .* it (reads|makes torch_xla run)"):
        give_away(f)(x)
    assert x.tolist() == [0, 1, 2]


def test_impurities_of_autograd_are_refused_and_undone(make):
    """The error names the impurity's line."""
    w = torch.nn.Parameter(make(3))

    def accumulates(x):
        (x * w).sum().backward()
        return x + 1

    def reads(x):
        return x - w.grad

    def clears(x):
        w.grad = None
        return x + 1

    def wants(x):
        x.requires_grad_()
        return x.detach()

    x = make(3)
    with line("adds to the gradient"):
        pure(accumulates)(x)
    assert w.grad is None
    w.grad = gradient = make(3)
    for f, text in ((accumulates, "adds to the gradient"), (reads, "reads .grad of"), (clears, "sets .grad of")):
        with line(text):
            pure(f)(x)
        assert w.grad is gradient
        assert gradient.tolist() == [0, 1, 2]
    with line("reads .grad of"):
        pure(lambda p: p.detach() - p.grad)(w)
    with line("sets requires_grad of"):
        pure(wants)(x)
    assert not x.requires_grad


def test_an_optimizer_that_steps_inside_is_refused(make):
    w = torch.nn.Parameter(make(4))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    w.grad = make(4)
    optimizer.step()
    before = w.tolist()
    with line("reads .grad of"):
        give_away(lambda optimizer: optimizer.step())(optimizer)
    assert w.tolist() == before
    doubled = give_away(lambda o: [state["momentum_buffer"] * 2 for state in o.state.values()])(optimizer)
    assert doubled[0].tolist() == [0, 2, 4, 6]


def test_random_numbers_of_the_host_and_its_tensors_are_refused(make):
    outside = torch.ones(3)
    state = torch.get_rng_state()
    with line("draws random numbers on the host"):
        pure(lambda x: x + torch.rand(3).to("xla"))(make(3))
    assert torch.equal(state, torch.get_rng_state())
    with line(r"reads float32\[3\] on cpu"):
        pure(lambda x: x + outside.to("xla"))(make(3))


@pytest.mark.parametrize("what", [lambda x: x, lambda x: x * 3, lambda x: x.clone(), lambda x: x.detach()])
def test_what_something_outside_keeps_is_refused(make, what):
    kept = []

    def f(x):
        kept.append(what(x))
        return x + 1, kept[0]

    x = make(3)
    with pytest.raises(DonationError, match="which something outside the function keeps"):
        give_away(f)(x)
    assert kept[0].tolist() == what(x).tolist()
    assert not is_donated(x)


# --- Memory, the proof, settings ---


def test_a_program_keeps_no_argument_alive(make):
    """The registry stays flat."""
    g, one = give_away(lambda x, y: x + y), make(10)
    assert_keeps_nothing(g, one, make)


def test_modules_and_partials_and_builtins_can_be_pure(make):
    layer = torch.nn.Linear(3, 3).to("xla")
    x = make(2, 3)
    with torch.no_grad():
        assert torch.allclose(pure(layer)(x), layer(x))
    assert pure(functools.partial(torch.mul, other=3))(make(2)).tolist() == [0, 3]
    assert pure(torch.neg)(make(2)).tolist() == [0, -1]


def test_a_module_is_given_away_with_its_parameters(make):
    def update(module, x):
        gradients = torch.autograd.grad(module(x).sum(), list(module.parameters()))
        return [(p - 0.1 * g).detach() for p, g in zip(module.parameters(), gradients)]

    g, x = give_away(update), make(2, 3)
    for _ in range(2):
        module = torch.nn.Linear(3, 3).to("xla")
        torch_xla.sync()
        expected = [t.cpu() for t in update(module, x)]
        assert all(torch.allclose(a.cpu(), b) for a, b in zip(g(module, x), expected))
        assert all(is_donated(p) for p in module.parameters())


def test_a_running_statistic_is_refused_and_kept(make):
    module = torch.nn.BatchNorm1d(3).to("xla")
    with line("updates a tensor from outside"):
        pure(lambda x: module(x).detach())(make(4, 3))
    assert module.num_batches_tracked.item() == 0


@in_process
def test_the_hlo_names_the_donors_of_each_signature(dump_folder):
    x, y = torch.ones(3, device="xla"), torch.ones(5, device="xla")
    g = give_away(lambda x, y: (x + 1, y + 1), name="donating")
    for _ in range(2):
        x, _ = g(x, y)
    torch_xla.sync(wait=True)
    found = [module for module in hlo.read_dump(dump_folder) if module.donors or module.aliases]
    assert len(found) == 1
    assert [found[0].shape_of(donor).dims for donor in found[0].donors] == [(3,)]
    assert [found[0].shape_of(alias).dims for alias in found[0].aliases] == [(3,)]


BACKENDS = pytest.mark.parametrize("options", [{"pure": True}, {"backend": "openxla"}], ids=["pure", "openxla"])


def _six_arguments(options):
    """Two calls with six arguments give the right values; whether each consumed the first two."""
    g = torch_xla_donate.compile(lambda *a: [x * (i + 1) for i, x in enumerate(a)], donate_argnums=0, **options)
    consumed = []
    for _ in range(2):
        xs = [torch.arange(3.0).to("xla") + i for i in range(6)]
        torch_xla.sync()
        assert [t.tolist() for t in g(*xs)] == [[(k + i) * (i + 1) for k in range(3)] for i in range(6)]
        consumed.append((is_donated(xs[0]), is_donated(xs[1])))
    return consumed


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "value"), [("XLA_ENABLE_PARAM_ALIASING", "0"), ("XLA_STABLEHLO_COMPILE", "1")])
@BACKENDS
@in_process(env=lambda name, value: {name: value})
def test_a_setting_that_ignores_donors_consumes_nothing(options, name, value):
    assert _six_arguments(options) == [(False, False)] * 2


@pytest.mark.filterwarnings("ignore::UserWarning")
@BACKENDS
@in_process(env={"XLA_PARAMETER_WRAPPING_THREADSHOLD": "2"})
def test_wrapped_parameters_are_donated(options):
    assert _six_arguments(options) == [(True, False)] * 2


@functools.cache
def mesh():
    xr.use_spmd()
    return xs.Mesh(np.arange(4), (4,), ("d",))


def shard(offset, spec=("d", None)):
    """A sharded tensor, and what `mark_sharding` has returned for it."""
    cut, t = mesh(), (torch.arange(32.0).reshape(8, 4) + offset).to("xla")
    wrapper = xs.mark_sharding(t, cut, spec)
    torch_xla.sync(wait=True)
    return t, wrapper


@BACKENDS
@in_process(devices=4)
def test_sharded_tensors_are_donated_at_every_call(options):
    g = torch_xla_donate.compile(lambda x, y: (x * 2 + 1, y + 1), donate_argnums=0, **options)
    for spec in (("d", None), (None, None)):
        for offset in (0, 3):
            x, y = shard(offset, spec)[0], shard(offset, spec)[0]
            a, b = g(x, y)
            assert torch.equal(a.cpu(), (torch.arange(32.0).reshape(8, 4) + offset) * 2 + 1)
            assert (is_donated(x), is_donated(y)) == (True, False)
            assert b.cpu()[0, 0].item() == offset + 1


@in_process(devices=4)
def test_a_sharded_tensor_is_donated_in_its_wrapper_and_named():
    w, wrapper = shard(0)
    assert give_away(lambda x: x + 1)(wrapper).cpu()[0, 1].item() == 2
    assert is_donated(w)
    w, _ = shard(0)
    with pytest.raises(DonationError, match="closes over"):
        pure(lambda x: x + w)(w)


# --- Against plain torch ---

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


@pytest.mark.parametrize("seed", range(20))
def test_random_functions_compute_what_plain_torch_computes(seed):
    rnd = random.Random(seed)
    torch.manual_seed(seed)
    count = rnd.randint(1, 4)
    program = [(rnd.choice([*OPERATIONS]), rnd.randrange(9), rnd.randrange(9)) for _ in range(rnd.randint(1, 6))]
    outputs = rnd.randint(1, 3)
    donated = tuple(i for i in range(count) if rnd.random() < 0.6)
    captured = torch.arange(4.0) - 1
    on_device = captured.to("xla")
    torch_xla.sync()

    def body(closed, arguments):
        values = [*arguments, closed]
        for name, i, j in program:
            values.append(OPERATIONS[name](values[i % len(values)], values[j % len(values)]))
        return values[-outputs:]

    def f(*arguments):
        return body(on_device, arguments)

    compiled = [pure(f, donate_argnums=donated), torch_xla_donate.compile(f, donate_argnums=donated)]
    if seed < 6 and all(name != "clone" for name, _, _ in program):  # stock torch_xla fails for some whole copies
        compiled.append(torch_xla_donate.compile(f, donate_argnums=donated, backend="openxla"))
    for g in compiled:
        for _ in range(3):
            host = [torch.randn(4) for _ in range(count)]
            device = [t.to("xla") for t in host]
            torch_xla.sync()
            for a, b in zip(g(*device), body(captured, host)):
                assert torch.allclose(a.cpu(), b, atol=1e-4)
            for i, t in enumerate(device):
                assert i in donated or torch.equal(t.cpu(), host[i])
            assert torch.equal(on_device.cpu(), captured)


def test_the_report_names_leaf_place_and_step(make):
    g = pure(lambda state: {"w": state["w"] * 2}, donate_argnames="state")
    g({"w": make(3)})
    (donor,) = donation_report(steps=1).donors
    assert donor.outcome == "donated"
    assert donor.name == "state['w'] (argument 0 of <lambda>)"
    assert re.search(r"test_pure.py:\d+$", donor.where)
    assert donor.array == "f32[3]"


# --- Loops ---


def cell(carry, x):
    return carry * x + 1, carry.sum()


def test_a_scan_is_traced_once_and_donates_at_every_call(make):
    traces = []

    @give_away
    def run(init, xs):
        traces.append(1)
        return scan(cell, init, xs, donate="init")

    final, ys = scan(cell, make(3), make(4, 3))
    expected = final.tolist(), ys.tolist()
    for _ in range(3):
        init, xs = make(3), make(4, 3)
        before = pointer(init)
        final, ys = run(init, xs)
        assert (is_donated(init), is_donated(xs)) == (True, False)
        assert (final.tolist(), ys.tolist()) == expected
        assert pointer(final) == before
        (donor,) = donation_report(steps=1).donors
        assert (donor.name, donor.outcome) == ("init (argument 0 of run)", "donated")
    assert len(traces) == 1


@in_process
def test_the_donation_of_a_scan_reaches_the_hlo(dump_folder):
    init, xs = torch.ones(64, 64).to("xla"), torch.ones(5, 64, 64).to("xla")
    torch_xla.sync(wait=True)
    run = give_away(lambda init, xs: scan(lambda c, x: (c * 2 + x, c.sum()), init, xs))
    for _ in range(2):
        init, _ = run(init, xs)
    assert init[0, 0].item() == 63 * 32 + 31
    aliased = [found.after for found in hlo.read_dump(dump_folder) if found.after is not None and found.after.aliases]
    assert [module.aliased_bytes for module in aliased] == [64 * 64 * 4]


@pytest.mark.parametrize("is_fn_pure", [False, True])
def test_arrays_that_a_scan_goes_over_are_read_at_every_call(make, is_fn_pure):
    xs = make(4, 3)
    run = give_away(lambda init: scan(cell, init, xs, is_fn_pure=is_fn_pure)[0])
    for _ in range(3):
        expected = scan(cell, make(3), xs)[0].tolist()
        assert run(make(3)).tolist() == expected
        xs.add_(1)
        torch_xla.sync()
    assert len(run._programs) == 1


def test_training_through_a_scan_computes_what_it_does_outside(make):
    def train(weights, init):
        weights = weights.detach().requires_grad_()
        final, ys = scan(cell, init, weights)
        (final.sum() + ys.sum()).backward()
        return weights.detach() - 0.01 * weights.grad, final.detach()

    step, weights, expected = give_away(train), make(4, 3), make(4, 3)
    for _ in range(3):
        given = weights
        weights, final = step(given, make(3))
        expected, expected_final = train(expected, make(3))
        torch_xla.sync()
        assert is_donated(given)
        assert torch.equal(weights.cpu(), expected.cpu()) and torch.equal(final.cpu(), expected_final.cpu())
    assert len(step._programs) == 1


class Doubling(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if self.training else 1)


def test_scanned_layers_are_read_at_every_call_in_their_mode(make):
    layers = [torch.nn.Sequential(Doubling(4, 4)).to("xla") for _ in range(2)]
    run = give_away(torch.no_grad()(lambda x: scan_layers(layers, x)))
    for step in range(4):
        for layer in layers:
            layer.train(step == 2)
            layer[0].weight.data.mul_(1.5)
        torch_xla.sync()
        x = make(2, 4)
        with torch.no_grad():
            result, plain = run(x).cpu(), torch.nn.Sequential(*layers)(make(2, 4)).cpu()
        assert is_donated(x)
        assert torch.allclose(result, plain, rtol=1e-4)
    assert len(run._programs) == 1


def test_a_scan_draws_other_random_numbers_at_every_call(make):
    run = pure(lambda init, xs: scan(lambda c, x: (c * 1, torch.rand_like(c) + x * 0 + c * 0), init, xs)[1])
    drawn = [run(make(2), make(3, 2)).flatten().tolist() for _ in range(3)]
    assert len({number for numbers in drawn for number in numbers}) == 18


def test_a_scan_that_donates_more_than_the_arguments_is_refused(make):
    run = pure(lambda init, xs: scan(cell, init, xs, donate="init"))
    init, xs = make(3), make(4, 3)
    with pytest.raises(DonationError, match="test_pure.py:.* it donates init, a tensor from outside, to a scan"):
        run(init, xs)
    assert not donation_report().pending
    assert init.tolist() == [0, 1, 2]
    with pytest.raises(DonationError, match="init is float32.3. on xla:0, not materialised"):
        pure(lambda init, xs: scan(cell, init * 2, xs, donate="init"))(init, xs)


def test_gradient_accumulation_is_refused_by_name(make):
    model, carried = torch.nn.Linear(4, 1).to("xla"), make(3)
    run = give_away(lambda a, xs: gradient_accumulation(lambda x, a: (model(x).sum(), a + 1), (xs,), model, a))
    with pytest.raises(DonationError, match="test_pure.py:.* it calls gradient_accumulation, which computes its arg"):
        run(carried, make(3, 2, 4))
    assert carried.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(w=state["w"] + 1),
        lambda state: state.update(n=state["n"] + 1),
        lambda state: state["log"].append(state["w"]),
        lambda state: state.pop("n"),
    ],
    ids=["tensor", "number", "list", "removed"],
)
def test_a_container_among_the_arguments_is_not_changed(make, change):
    def f(state):
        change(state)
        return state["w"] * 2

    state = {"w": make(3), "n": 0, "log": []}
    with pytest.raises(
        DonationError, match=r"f is declared pure, but it changes what state \(argument 0 of f\) contains"
    ):
        give_away(f)(state)
    assert state["w"].tolist() == [0, 1, 2]
    assert (state["n"], state["log"]) == (0, [])


def test_an_argument_that_is_kept_is_named_as_an_argument(make):
    kept = []
    with pytest.raises(DonationError, match=r"it gets the argument float32\[3\], which something outside the function"):
        pure(lambda x: (kept.append(x), x + 1)[1])(make(3))


# --- Other threads ---


def test_a_mark_cancelled_before_the_run_is_not_consumed(make, monkeypatch):
    """The graph was compiled with the donor, so the call raises before anything runs."""
    double = give_away(lambda t: t * 2)
    double(make(4))
    t = make(4)
    arm_run = _C.arm_run

    def cancel_then_arm(*arguments):  # as another thread would, between the choice of the graph and its run
        cancel_donation(t)
        return arm_run(*arguments)

    monkeypatch.setattr(_C, "arm_run", cancel_then_arm)
    with pytest.raises(DonationError, match=r"another thread has called cancel_donation .*Nothing was donated"):
        double(t)
    monkeypatch.undo()
    assert not is_donated(t) and t.tolist() == [0, 1, 2, 3]
    assert double(t).tolist() == [0, 2, 4, 6] and is_donated(t)


def test_a_mark_whose_run_begins_cannot_be_cancelled(make, monkeypatch):
    double = give_away(lambda t: t * 2)
    t = make(4)
    arm_run = _C.arm_run

    def arm_then_cancel(*arguments):
        armed = arm_run(*arguments)
        with pytest.raises(DonationError, match=r"a step has consumed it\. .*No mark was cancelled"):
            cancel_donation(t)
        return armed

    monkeypatch.setattr(_C, "arm_run", arm_then_cancel)
    assert double(t).tolist() == [0, 2, 4, 6] and is_donated(t)


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_a_module_that_holds_a_view_is_refused(make, donated):
    """A view of that view reads the base, and replays would compute from the first call's base."""
    module = torch.nn.Module()
    base = make(9).reshape(3, 3).clone()
    module.register_buffer("turned", base.t())
    torch_xla.sync()
    f = torch_xla_donate.compile(lambda m: m.turned.view_as(m.turned) + 0, donate_argnums=donated, pure=True)
    with pytest.raises(DonationError, match=r"a module or optimizer among its arguments holds .*\[3,3\], a view of"):
        f(module)
    assert not _C.pending()
    module.turned = base.t().clone()
    torch_xla.sync()
    assert f(module).tolist() == base.cpu().t().tolist()
    module.turned = base + 1
    torch_xla.sync()
    assert f(module).tolist() == (base.cpu() + 1).tolist()
