"""compile(pure=True): traced once for each signature and replayed; what it sees, refuses and gives away."""

from __future__ import annotations

import dataclasses
import gc
import re
import weakref

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import UNUSABLE_IGNORED, compiles, consume, error_of, last_reasons, no_collections, pointer, whole_copy
from torch.func import functional_call
from torch.nn.modules import module as modules
from torch_xla import _XLAC
from torch_xla.utils.checkpoint import checkpoint

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
    is_donated,
    scan,
    scan_layers,
)

pytestmark = UNUSABLE_IGNORED


@pytest.fixture(autouse=True)
def _host_as_before():
    yield
    assert _XLAC._get_allow_execution()
    assert not _XLAC._get_use_eager_mode()


def pure(f, **options):
    return torch_xla_donate.compile(f, pure=True, **options)


def give_away(f, **options):
    return pure(f, donate_argnums=0, **options)


# --- Replays ---


def test_a_function_is_traced_and_compiled_once_for_each_signature(make):
    """Any dtype is donated at every call, and arrays without elements do no harm."""
    traces = []

    def f(x):
        traces.append(1)
        return x.logical_not() if x.dtype is torch.bool else x + x

    g = give_away(f)
    for name in ("float32", "bfloat16", "float16", "int32", "int64", "int8", "bool", "complex64"):
        dtype, count = getattr(torch, name), len(traces)
        for call in range(3):
            x = make(6, dtype=dtype)
            address, compiled = pointer(x), compiles()
            y = g(x)
            assert (pointer(y), y.dtype) == (address, dtype)
            assert call == 0 or compiles() == compiled
        assert len(traces) == count + 1
    for shape in ((0,), (0,), (2, 0, 3)):
        assert g(make(*shape)).shape == shape


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


def test_a_replay_draws_other_numbers_than_pending_work(make):
    g, x = pure(lambda x: x * 0 + torch.rand(4, device="xla")), make(4)
    g(x)
    drawn = []
    for _ in range(2):
        pending = torch.rand(4, device="xla")
        drawn += [g(x), pending]
    assert len({str(t.tolist()) for t in drawn}) == 4


def test_a_graph_that_left_the_cache_is_compiled_again(make, monkeypatch):
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


def test_inference_mode_does_not_matter(make):
    g = give_away(lambda x: x + 1)
    with torch.inference_mode():
        assert g(make(3)).tolist() == [1, 2, 3]
    assert g(make(3)).tolist() == [1, 2, 3]


def test_each_state_of_autocast_has_a_graph(make):
    for g in (pure(lambda x: x @ x), give_away(lambda x: x @ x)):
        for _ in range(3):
            assert g(make(2, 2)).dtype == torch.float32
            with torch.autocast("xla", dtype=torch.bfloat16):
                assert g(make(2, 2)).dtype == torch.bfloat16


def test_casts_that_autocast_keeps_are_no_constants(make):
    """Neither the program's in the trace, nor those of the trace in the program, as long as autocast is on."""
    model, x = torch.nn.Linear(2, 1, bias=False).to("xla"), make(1, 2)
    with torch.no_grad():
        evaluate = pure(lambda x: model(x).detach())
    step = give_away(lambda w, x: w.detach() - 1 + torch.autograd.grad(torch.nn.functional.linear(x, w).sum(), w)[0])
    for k in (1, 5):
        with torch.no_grad():
            model.weight.copy_(make(1, 2) + k)
        torch_xla.sync()
        with torch.autocast("xla", torch.bfloat16):
            model(x)
            assert evaluate(x).tolist() == [[1 + k]]
            w = (make(1, 2) + k).requires_grad_()
            torch_xla.sync()
            assert step(w, x).tolist() == [[k - 1, k + 1]]
            assert is_donated(w)


def test_a_seed_set_inside_is_followed(make):
    """A checkpoint draws the same numbers twice, other ones at each call; a seed of the function is as it says."""
    drop = torch.nn.Dropout(0.5)

    def masks(x):
        w = x.detach().requires_grad_()
        before = drop(w)
        y = checkpoint(drop, w * 2)
        after = drop(w)
        y.sum().backward()
        return y.detach(), w.grad, before.detach(), after.detach()

    def seeded(x):
        torch_xla.manual_seed(7)
        return x + torch.rand(4, device="xla")

    g, seen = pure(masks), []
    for _ in range(3):
        y, gradient, before, after = g(make(64) * 0 + 1)
        assert torch.equal(y, gradient)
        seen += [y, 4 * before, 4 * after]
    assert len({tuple(one.tolist()) for one in seen}) == 9
    expected = torch_xla_donate.compile(seeded)(make(4)).tolist()
    g = pure(seeded)
    assert g(make(4)).tolist() == g(make(4)).tolist() == expected


def test_each_default_dtype_has_a_graph(make):
    """With a factory in it, and with a float among its arguments."""
    factory, number = pure(lambda x: x + torch.ones(3, device="xla")), pure(lambda x, n: x * n)
    x = make(3, dtype=torch.int64)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert factory(x).dtype == number(x, 0.5).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


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


@pytest.mark.parametrize("argument", [lambda w: w, whole_copy], ids=["itself", "whole_copy"])
def test_an_argument_does_not_stand_for_a_captured_tensor(make, argument):
    w = make(4)
    g = pure(lambda x: x + w)
    assert g(argument(w)).tolist() == [0, 2, 4, 6]
    assert g(make(4) + 10).tolist() == [10, 12, 14, 16]


def test_tensors_that_functorch_wraps_are_captured(make):
    w, x = {"w": make(3)}, make(3)
    f = pure(lambda x: torch.func.grad(lambda w: (w["w"] ** 2 * x).sum())(w)["w"])
    for k in (1, 5):
        w["w"].copy_(make(3) + k)
        torch_xla.sync()
        assert f(x).tolist() == [0, 2 * (k + 1), 4 * (k + 2)]


def test_a_tensor_from_outside_that_the_trace_does_not_see_is_refused(make):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * scale

    @torch.library.custom_op("torch_xla_donate_tests::scales", mutates_args=())
    def scales(x: torch.Tensor) -> torch.Tensor:
        return x * scale

    scales.register_fake(torch.empty_like)

    def hooked(x, *_, by=None):
        leaf = x.detach().requires_grad_()
        hidden = leaf * 1
        hidden.register_hook(lambda g: g * (scale if by is None else by))
        return torch.autograd.grad(hidden.sum(), leaf)[0]

    def function(x, *_):
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(Scaled.apply(leaf).sum(), leaf)[0]

    def operation(x, *_):
        return scales(x * 0 + 1)

    class Scripted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return (x * 0 + 1) * self.scale

    scale, x = make(3), make(3)
    scripted = torch.jit.script(Scripted())
    for _ in range(2):
        message = error_of(DonationError, pure(lambda x: scripted(x)), x)
        assert "from outside where the trace does not see it" in message
    for f in (hooked, function, operation):
        message = error_of(DonationError, give_away(f), x)
        assert r"uses float32[3] from outside where the trace does not see it" in message
        for argument in (scale, scale.detach()):
            assert error_of(DonationError, pure(f, donate_argnums=(0, 1)), x, argument) == message
        assert not is_donated(x) and not is_donated(scale)
    with_argument = pure(lambda x, s: hooked(x, by=s), donate_argnums=1)
    for k in (1, 5):
        assert with_argument(x, make(3) + k).tolist() == [k, k + 1, k + 2]
    g = torch_xla_donate.compile(operation, backend="openxla")
    for k in (1, 5):
        scale.copy_(make(3) + k)
        torch_xla.sync()
        assert g(x).tolist() == [k, k + 1, k + 2]


def test_captured_tensors_that_share_a_buffer_are_updated_apart(make):
    w = make(4)
    average = whole_copy(w)
    g = pure(lambda x: x + w * 10 + average)
    x = make(4)
    assert g(x).tolist() == [0, 12, 24, 36]
    w.copy_(make(4) + 1)
    assert g(x).tolist() == [10, 22, 34, 46]


def test_a_captured_tensor_and_its_alias_may_part(make):
    w = make(3)
    alias = w.detach()
    f = pure(lambda x: x + w * alias)
    assert f(make(3)).tolist() == [0, 2, 6]
    w.add_(1)
    assert f(make(3)).tolist() == [1, 5, 11]
    w.data = make(3) + 10
    for _ in range(2):
        assert f(make(3)).tolist() == [10, 23, 38]
    assert len(f._programs) == 1


def test_cached_constants_are_told_from_arguments_and_captures(make):
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


FACTORIES = {
    "zeros": lambda x: torch.zeros(3, 3, device=x.device),
    "full": lambda x: torch.full((3, 3), 2.0, device=x.device),
    "empty and fill_": lambda x: torch.empty(3, 3, device=x.device).fill_(2.0),
    "arange": lambda x: torch.arange(9.0, device=x.device).reshape(3, 3),
    "eye": lambda x: torch.eye(3, device=x.device),
    "linspace": lambda x: torch.linspace(0, 1, 9, device=x.device).view(3, 3),
    "random numbers": lambda x: torch.rand(3, 3, device=x.device) * 0,
    "an upload": lambda x: torch.ones(3, 3).to(x.device),
    "tensor": lambda x: torch.tensor([[1.0, 2.0, 3.0]] * 3, device=x.device),
    "computed": lambda x: torch.zeros(3, 3, device=x.device) + 1,
    "a clone": lambda x: torch.ones(3, 3, device=x.device).clone(),
    "the like of it": lambda x: torch.zeros_like(torch.ones(3, 3, device=x.device)),
    "several": lambda x: torch.stack(torch.meshgrid(*[torch.arange(3.0, device=x.device)] * 2, indexing="ij"))[0],
    "the default device": lambda x: torch.set_default_device(x.device) or torch.ones(3, 3),
    "an argument": lambda x: x * 1,
}


def written_through_views(t, x):
    t[1] = 7.0
    t[:, 2:] = x[:, 2:]
    t.view(9)[3:].add_(1)
    t.t().triu_()
    first, *_ = t.unbind(0)
    first.mul_(x[0])
    torch.add(x[2], 1, out=t[2])
    t.diagonal().fill_(5)
    return t


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_write_through_a_view_changes_what_a_factory_made(factory, make):
    def loss(x):
        t = FACTORIES[factory](x)
        t[1] = x[0]
        return (t * x).sum()

    def f(x):
        try:
            written = written_through_views(FACTORIES[factory](x), x)
            return written, written * x, torch.func.grad(loss)(x)
        finally:
            torch.set_default_device(None)

    g = pure(f)
    for first in (1, 4):
        x = (make(9) + first).view(3, 3).clone()
        torch_xla.sync()
        assert [t.tolist() for t in g(x)] == [t.tolist() for t in f(x.cpu())]


def test_indices_that_torch_xla_computes_in_32_bits_stay_int64(make):
    """Their buffers are s32. As arguments they have another graph than int64 tensors whose buffers are s64."""

    def f(x, indices):
        found = torch.cummax(x, 0)[1]
        pooled = torch.nn.functional.max_pool1d(x[None, None], 2, return_indices=True)[1]
        return x + 1, found + 2 * indices, pooled, indices / 2, indices

    for options in ({}, {"donate_argnums": 0}):
        x, x_on_cpu = make(4) + 1, torch.arange(4.0) + 1
        uploaded, computed = torch.tensor([0, 1, 2, 3]).to("xla"), torch.cummax(x, 0)[1]
        torch_xla.sync()
        by_torch_compile = torch_xla_donate.compile(f, backend="openxla", **options)
        for g in (pure(f, **options), torch_xla_donate.compile(f, **options), by_torch_compile):
            for indices in (uploaded, computed, uploaded, computed):
                found, expected = g(x.clone(), indices), f(x_on_cpu, indices.cpu())
                assert [t.tolist() for t in found] == [t.tolist() for t in expected]
                # torch.compile itself gives the dtype of the buffer.
                assert g is by_torch_compile or [t.dtype for t in found] == [t.dtype for t in expected]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "int16", "float64", "float8_e5m2", "complex128"])
def test_arguments_and_results_keep_their_dtype(dtype, make):
    """From a buffer of u16 alone torch_xla makes an int16 tensor."""
    dtype = getattr(torch, dtype)
    g, seen = give_away(lambda t, x: seen.append(t.dtype) or (t.clone(), x.to(dtype))), []
    for _ in range(3):
        t = make(4).to(dtype)
        torch_xla.sync()
        assert [found.dtype for found in g(t, make(4))] == [dtype, dtype]
    assert set(seen) == {dtype}


def test_indices_of_32_bits_replay_and_are_captured(make):
    def f(state):
        return {"x": state["x"] + 1, "indices": torch.cummax(state["x"], 0)[1] + state["indices"]}

    x = make(4)
    captured = torch.cummax(x, 0)[1]
    state = {"x": x + 0, "indices": captured + 0}
    expected = {"x": torch.arange(4.0), "indices": torch.arange(4)}
    torch_xla.sync()
    assert captured.dtype == torch.int64
    assert pure(lambda t: (t[captured], captured * 2))(x)[1].dtype == torch.int64
    g = give_away(f)
    for _ in range(4):
        state, expected = g(state), f(expected)
    assert {name: (t.dtype, t.tolist()) for name, t in state.items()} == {
        name: (t.dtype, t.tolist()) for name, t in expected.items()
    }


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


def test_a_new_module_at_an_old_address_is_traced_anew(make):
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
    consume(w)
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


# --- Results ---


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


def test_derivatives_without_memory_are_zeros(make):
    """Autograd has tensors of zeros without memory, which cannot become Python objects."""
    hessian = pure(torch.func.hessian(lambda x: (x**3).sum()))
    assert hessian(make(3)).tolist() == [[0, 0, 0], [0, 6, 0], [0, 0, 12]]
    assert pure(torch.func.grad(lambda x: (torch.sgn(x) + x).sum()))(make(3)).tolist() == [1, 1, 1]


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
    """Before a call that wants no gradients, and after one: the two share no program."""
    g, w = pure(lambda w: w * 2), make(3).requires_grad_()
    for _ in range(2):
        assert "gradient history" in error_of(DonationError, g, w)
        with torch.no_grad():
            assert g(w).tolist() == [0, 2, 4]


# --- Refusals ---


def line(text):
    """The message of a refusal that names a line of this file."""
    return pytest.raises(DonationError, match=rf"at \S*test_pure.py:\d+ it {text}")


UPDATES = {
    "add_": lambda x: x.add_(1),
    "setitem": lambda x: x.__setitem__(0, 5),
    "a view": lambda x: x.view(4).mul_(2),
    "a chunk": lambda x: x.chunk(2)[0].add_(1),
    "a detached alias": lambda x: x.detach().add_(1),
    "data": lambda x: setattr(x, "data", x + 1),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "out": lambda x: torch.add(x, 1, out=x),
    "an operator": lambda x: torch.ops.aten.add_.Tensor(x, x),
    "copy_": lambda x: x.copy_(x + 1),
    "resize_": lambda x: x.resize_(2),
    "data of another shape": lambda x: setattr(x, "data", x[:2] + 1),
    "data of another dtype": lambda x: setattr(x, "data", x.double()),
}
READS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: print(x),
    "format": lambda x: f"{x}",
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "on the host": lambda x: torch.histc(x, 4, 0, 10),
    "copy to the host": lambda x: torch.empty(3).copy_(x),
    "slice": lambda x: x[: x[1].long()],
    "numpy": lambda x: x.numpy(force=True),
    "save": lambda x: xm.save({"x": x}, "/dev/null"),
}


@pytest.mark.parametrize("captured", [False, True])
def test_updating_tensors_from_outside_is_refused_at_its_line(make, captured):
    w, x = make(4), make(4)
    for name, update in UPDATES.items():
        g = give_away(lambda x, update=update: (update(w if captured else x), x * 2)[1])
        refusal = r"at \S*test_pure.py:\d+ it updates (an argument|a tensor) from outside"
        assert re.search(refusal, error_of(DonationError, g, x)), name
        assert x.tolist() == w.tolist() == [0, 1, 2, 3], name
        assert x.dtype == w.dtype == torch.float32, name
        assert not is_donated(x)


def test_reads_on_the_host_are_refused(make, custom_operations):
    x = make(3)
    doubled, _ = custom_operations
    for name, read in {**READS, "a user's operation": doubled}.items():
        g = give_away(lambda x, read=read: (read(x), x + 1)[1])
        refusal = r"is declared pure, but at \S*test_pure.py:\d+ it (reads|makes torch_xla run)"
        assert re.search(refusal, error_of(DonationError, g, x)), name
        assert x.tolist() == [0, 1, 2], name


@pytest.mark.parametrize("kept", [False, True])
def test_an_error_of_a_refused_trace_holds_no_argument(make, kept):
    """So another function may donate it, in the `except` block and if the error is kept."""
    x, errors = make(3), []

    def read(x):
        same = x.detach()
        return same + x.sum().item()

    try:
        give_away(read)(x)
    except DonationError as error:
        errors += [error] * kept
        out = consume(x)
    assert is_donated(x) and out.tolist() == [1, 2, 3]


def test_a_refused_trace_leaves_what_the_program_handles(make):
    """Such as a generator that has caught an error, and waits."""
    x, held = make(3), []

    def batches():
        try:
            raise ValueError("bad batch")
        except ValueError as error:
            held.append(error)
        yield "good batch"

    waiting = batches()
    assert next(waiting) == "good batch" and held[0].__traceback__.tb_frame is waiting.gi_frame
    try:
        raise held[0]
    except ValueError:
        with pytest.raises(DonationError, match="declared pure"):
            give_away(lambda x: x + x.sum().item())(x)
    assert waiting.gi_frame is not None


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
    may_read = pure(lambda x: x * 2 if w.grad is None else x - w.grad)
    assert may_read(x).tolist() == may_read(x).tolist() == [0, 2, 4]
    w.grad = gradient = make(3)
    for f, text in ((accumulates, "adds to the gradient"), (reads, "reads .grad of"), (clears, "sets .grad of")):
        with line(text):
            pure(f)(x)
        assert w.grad is gradient
        assert gradient.tolist() == [0, 1, 2]
    with line("reads .grad of"):
        may_read(x)
    with line("reads .grad of"):
        pure(lambda p: p.detach() - p.grad)(w)
    may_read = give_away(lambda x: x * 2 if x.grad is None else x - x.grad)
    for _ in range(2):
        assert may_read(make(3)).tolist() == [0, 2, 4]
    x.grad = make(3)
    with line("reads .grad of"):
        may_read(x)
    x.grad = None
    with line("sets requires_grad of"):
        pure(wants)(x)
    assert not x.requires_grad
    assert pure(lambda x: x.requires_grad_(requires_grad=False) * 2)(x).tolist() == [0, 2, 4]  # as it is


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
    outside, own = torch.ones(3), torch.Generator()
    state = torch.get_rng_state()
    with line("draws random numbers on the host"):
        pure(lambda x: x + torch.rand(3, generator=own).to("xla"))(make(3))
    with line("draws random numbers on the host"):
        pure(lambda x: x + torch.rand(3).to("xla"))(make(3))
    assert torch.equal(state, torch.get_rng_state())
    with line(r"reads float32\[3\] on cpu"):
        pure(lambda x: x + outside.to("xla"))(make(3))


def test_keeping_a_tensor_outside_is_refused(make):
    for what, verb in (
        (lambda x: x, "gets the argument"),
        (lambda x: x * 3, "makes"),
        (lambda x: x.clone(), "makes"),
        (lambda x: x.detach(), "makes"),
    ):
        kept, x = [], make(3)
        g = give_away(lambda x, kept=kept, what=what: (kept.append(what(x)), (x + 1, kept[0]))[1])
        assert f"it {verb} float32[3], which something outside the function, or a hook, keeps" in error_of(
            DonationError, g, x
        )
        assert kept[0].tolist() == what(x).tolist()
        assert not is_donated(x)


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
        torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-3)  # random weights: large terms may cancel
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
    with pytest.raises(DonationError, match="init is float32.3. on xla:0 and has no buffer yet"):
        pure(lambda init, xs: scan(cell, init * 2, xs, donate="init"))(init, xs)


def test_gradient_accumulation_is_refused_by_name(make):
    model, carried = torch.nn.Linear(4, 1).to("xla"), make(3)
    run = give_away(lambda a, xs: gradient_accumulation(lambda x, a: (model(x).sum(), a + 1), (xs,), model, a))
    with pytest.raises(DonationError, match="test_pure.py:.* it calls gradient_accumulation, which computes its arg"):
        run(carried, make(3, 2, 4))
    assert carried.tolist() == [0, 1, 2]


def test_changing_a_container_among_the_arguments_is_refused(make):
    for name, change in {
        "tensor": lambda state: state.update(w=state["w"] + 1),
        "number": lambda state: state.update(n=state["n"] + 1),
        "list": lambda state: state["log"].append(state["w"]),
        "removed": lambda state: state.pop("n"),
        "type of a key": lambda state: state.update({True: state.pop(1)}),
    }.items():
        state = {"w": make(3), "n": 0, "log": [], 1: "one"}
        g = give_away(lambda state, change=change: (change(state), state["w"] * 2)[1])
        refusal = "<lambda> is declared pure, but it changes what state (argument 0 of <lambda>) contains"
        assert refusal in error_of(DonationError, g, state), name
        assert state["w"].tolist() == [0, 1, 2]
        assert (state["n"], state["log"]) == (0, []) and [*map(type, state)] == [str, str, str, int], name


# --- Other threads ---


@pytest.mark.parametrize("marked_again", [False, True])
def test_a_mark_cancelled_before_the_run_raises_and_keeps_the_tensor(make, monkeypatch, marked_again):
    """The graph was compiled with the donor, so the call raises before anything runs."""
    double = give_away(lambda t: t * 2)  # its first call; later ones mark and arm without a gap
    t = make(4)
    arm_run = _C.arm_run

    def cancel_then_arm(*arguments):  # as another thread would, between the choice of the graph and its run
        cancel_donation(t)
        if marked_again:  # for a step, not for the run
            donate_buffer(t)
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
        with pytest.raises(ZeroDivisionError), donate_buffer(t):
            raise ZeroDivisionError
        return armed

    monkeypatch.setattr(_C, "arm_run", arm_then_cancel)
    assert double(t).tolist() == [0, 2, 4, 6] and is_donated(t)


def test_a_step_of_another_thread_leaves_the_mark_of_a_run_that_begins(make, monkeypatch):
    """The step has found the mark before the run armed it, and claims its donors afterwards."""
    double = give_away(lambda t: t * 2)
    t = make(4)
    donate_buffer(t)
    arm_run = _C.arm_run

    def arm_before_a_claim(*arguments):
        armed = []
        assert _C.claim_marks([t], lambda: armed.append(arm_run(*arguments)), False) == 0
        return armed[0]

    monkeypatch.setattr(_C, "arm_run", arm_before_a_claim)
    assert double(t).tolist() == [0, 2, 4, 6] and is_donated(t)


def test_a_step_whose_run_is_refused_keeps_its_donors(make):
    """As inside a trace: the step has claimed them by then."""
    w = make(4)
    donate_buffer(w)
    out = w + 1
    _C.refuse_runs(True)
    try:
        with pytest.raises(RuntimeError, match="Unexpected execution while a function is traced"):
            torch_xla.sync()
    finally:
        _C.refuse_runs(False)
    assert not is_donated(w)
    assert w.tolist() == [0, 1, 2, 3]
    assert not _C.pending()
    del out


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


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}], ids=str)
def test_an_argument_of_another_class_is_another_signature(make, options):
    class Plus(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            result = super().__torch_function__(func, types, args, kwargs or {})
            return result + 100 if func in (torch.Tensor.mul, torch.Tensor.__mul__) else result

    f = torch_xla_donate.compile(lambda x: x * 2 - int(isinstance(x, torch.nn.Parameter)), pure=True, **options)
    for _ in range(2):
        for kind, expected in ((torch.Tensor, [0, 2]), (Plus, [100, 102]), (torch.nn.Parameter, [-1, 1])):
            x = torch.Tensor._make_subclass(kind, make(2))
            torch_xla.sync()
            assert f(x).tolist() == expected


def test_marks_and_tangents_in_a_pure_function_are_refused(make):
    w, x = make(3), make(3)
    with line("calls donate_buffer, which a replay would not do. Call it outside"):
        pure(lambda x: (donate_buffer(w), x * 2)[1])(x)
    assert not donation_report().pending
    donate_buffer(w)
    with line("calls cancel_donation, which a replay would not do"):
        pure(lambda x: (cancel_donation(w), x * 2)[1])(x)
    assert donation_report().pending
    cancel_donation(w)
    f = pure(lambda x: x * x)
    f(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(DonationError, match="inside forward_ad.dual_level"):
        f(torch.autograd.forward_ad.make_dual(x, x))
    assert f(x).tolist() == [0, 1, 4]


def test_a_stand_in_has_the_hooks_and_attributes_of_its_argument(make):
    def weighted(w):
        return torch.autograd.grad((w * w).sum(), w)[0] * getattr(w, "factor", 1)

    w, f = torch.nn.Parameter(make(3)), pure(weighted)
    assert f(w).tolist() == [0, 2, 4]
    handle = w.register_hook(lambda g: g.clamp(max=3))
    assert f(w).tolist() == [0, 2, 3]
    handle.remove()
    w.register_hook(lambda g: g.clamp(max=1))
    assert f(w).tolist() == [0, 1, 1]
    w.factor = 10
    assert pure(weighted)(w).tolist() == [0, 10, 10]


def test_another_gradient_hook_is_another_signature(make):
    """It counts by its identity."""

    @dataclasses.dataclass
    class Most:  # without a hash, and equal to another one
        most: list[int] = dataclasses.field(compare=False)

        def __call__(self, gradient):
            return gradient.clamp(max=self.most[0])

    def descend(w, x):
        return w.detach() - torch.autograd.grad((w * x).sum(), w)[0]

    f, one, two = pure(descend, donate_argnums=0), Most([1]), Most([2])
    for hook in (one, one, one, two, two):
        w = make(3).requires_grad_()
        w.register_hook(hook)
        assert f(w, make(3)).tolist() == [k - min(k, hook.most[0]) for k in range(3)]
    assert len(f._programs) == 2


def test_a_hook_that_refers_to_the_function_keeps_nothing_alive(make):
    class Trainer:
        def noted(self, gradient):
            return gradient * 1

    trainer, x = Trainer(), make(3)
    trainer.f = pure(lambda w, x: torch.autograd.grad((w * x).sum(), w)[0] + w.detach(), donate_argnums=0)
    for _ in range(2):
        w = make(3).requires_grad_()
        w.register_hook(trainer.noted)
        assert trainer.f(w, x).tolist() == [0, 2, 4]
    gone = weakref.ref(trainer)
    del trainer, w
    gc.collect()
    assert gone() is None


def test_a_module_and_its_tensor_are_one_among_the_arguments(make):
    layer, x = torch.nn.Linear(3, 1).to("xla"), make(2, 3)

    def gradients(m, parameters, x):
        loss = m(x).sum() + sum(p.pow(2).sum() for p in parameters)
        return torch.autograd.grad(loss, list(m.parameters()))

    expected = [g.cpu() for g in gradients(layer, list(layer.parameters()), x)]
    for found, g in zip(pure(gradients)(layer, list(layer.parameters()), x), expected):
        assert torch.equal(found.cpu(), g)
    for other in (layer.bias, layer.state_dict(), [p.detach() for p in layer.parameters()]):
        assert torch.equal(pure(lambda m, o, x: m(x).detach())(layer, other, x).cpu(), layer(x).detach().cpu())


def test_one_tensor_twice_is_not_two_tensors_of_one_buffer(make):
    x = make(3).requires_grad_()
    alias = x.detach().requires_grad_()
    for calls in (((x, x, 2), (x, alias, 1)), ((x, alias, 1), (x, x, 2))):
        f = pure(lambda x, y: torch.autograd.grad((x * y).sum(), x)[0])
        for one, other, factor in calls:
            assert f(one, other).tolist() == [0, factor, 2 * factor]


def test_an_argument_of_a_subclass(make):
    """It does not stand for the same tensor in the closure, as a plain one. Made of other tensors, it is refused."""

    class Weight(torch.Tensor):
        pass

    weight = make(3).as_subclass(Weight)
    torch_xla.sync()
    f = pure(lambda w: w + 10 * weight)
    assert f(weight).tolist() == [0, 11, 22]
    result = f((make(3) + 1).as_subclass(Weight))
    assert type(result) is Weight and result.tolist() == [1, 12, 23]

    class Two(torch.Tensor):
        __torch_dispatch__ = None

        @staticmethod
        def __new__(cls, one, other):
            return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype, device=one.device)

    for function, argument in ((lambda w: w * 1, Two(make(3), make(3))), (lambda w: Two(w, w), make(3))):
        message = error_of(DonationError, pure(function), argument)
        assert "float32[3] of the class Two, which is made of other tensors" in message


def test_what_a_trace_does_not_see_is_refused_if_something_keeps_it(make):
    """Hooks in the backward pass, and operations of a user, run where the trace does not look."""
    kept = []

    def logs_a_norm(w, x):
        leaf = w.detach().requires_grad_()
        hidden = x @ leaf
        hidden.register_hook(lambda g: kept.append(g.norm()))
        (gradient,) = torch.autograd.grad(hidden.pow(2).sum(), leaf)
        return w - gradient

    @torch.library.custom_op("torch_xla_donate_tests::keeps_a_row", mutates_args=())
    def keeps_a_row(x: torch.Tensor) -> torch.Tensor:
        kept.append(x[1:])
        return x * 2

    for f, value, pending in (
        (logs_a_norm, 7.2111025, False),
        (lambda w, x: keeps_a_row(w), [[2.0, 3.0]], False),
        (lambda w, x: keeps_a_row(w), [[2.0, 3.0]], True),  # before the call pending work reads the argument
    ):
        kept.clear()
        w, x = make(2, 2), make(1, 2)
        work = w + 1 if pending else None
        message = error_of(DonationError, pure(f, donate_argnums=0), w, x)
        assert "computes something from float32[2,2] that a hook, an operation or something outside" in message
        torch_xla.sync()
        assert w.tolist() == [[0.0, 1.0], [2.0, 3.0]]
        assert work is None or work.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        torch.testing.assert_close(kept[0].cpu(), torch.tensor(value))
        with donation_disabled():  # then nothing can be lost
            pure(f, donate_argnums=0)(w, x)


@no_collections()
def test_what_only_garbage_keeps_of_a_trace_is_no_obstacle(make):
    @torch.library.custom_op("torch_xla_donate_tests::makes_garbage", mutates_args=())
    def makes_garbage(x: torch.Tensor) -> torch.Tensor:
        cycle = [x * 2]
        cycle.append(cycle)
        return x + 1

    makes_garbage.register_fake(torch.empty_like)
    for options in ({"pure": True}, {"backend": "openxla"}):
        step, x = torch_xla_donate.compile(lambda x: makes_garbage(x), donate_argnums=0, **options), make(3)
        assert step(x).tolist() == [1, 2, 3]
        assert is_donated(x), options


def test_random_numbers_that_an_operation_draws_on_the_host_are_refused(make):
    @torch.library.custom_op("torch_xla_donate_tests::noisy", mutates_args=())
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape).to(x.device)

    noisy.register_fake(torch.empty_like)
    x = make(3)
    assert "draws random numbers on the host" in error_of(DonationError, pure(noisy, donate_argnums=0), x)
    assert x.tolist() == [0.0, 1.0, 2.0]
    step = torch_xla_donate.compile(lambda x: noisy(x), backend="openxla")
    assert step(x).tolist() != step(x).tolist()


@pytest.mark.parametrize("options", [{"pure": True}, {"backend": "openxla"}, {}], ids=str)
def test_hooks_that_come_and_go_after_the_first_call_count(make, options):
    """They get the module itself."""
    inner = torch.nn.Identity()
    step = torch_xla_donate.compile(inner, **options)
    found = [step(make(2)).tolist()]
    step.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    last = step.register_forward_hook(lambda module, given, result: result + 100 * (module is inner))
    found.append(step(make(2)).tolist())
    last.remove()
    found.append(step(make(2)).tolist())
    assert found == [[0.0, 1.0], [100.0, 102.0], [0.0, 2.0]]


def test_hooks_of_all_modules_count(make):
    layer = torch.nn.Identity()
    f = pure(lambda x: layer(x * 1))
    assert f(make(3)).tolist() == [0, 1, 2]
    handle = modules.register_module_forward_hook(lambda module, args, output: output * 10)
    assert f(make(3)).tolist() == [0, 10, 20]
    handle.remove()
    assert f(make(3)).tolist() == [0, 1, 2]


def test_a_hook_of_the_function_itself_is_no_reason_to_trace_again(make):
    layer, traces = torch.nn.Linear(2, 2).to("xla"), []

    def feature(x):
        traces.append(x)
        kept = []
        hook = layer.register_forward_hook(lambda module, given, result: kept.append(result.detach()))
        layer(x)
        hook.remove()
        traces[-1] = None
        return kept[0]

    step = pure(feature)
    for _ in range(3):
        step(make(1, 2))
    assert len(traces) == 1
