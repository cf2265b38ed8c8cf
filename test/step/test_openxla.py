"""compile(backend="openxla"): each call consumes exactly what it offers, whatever torch.compile has compiled before."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading

import pytest
import torch
import torch._dynamo
import torch_xla
import torch_xla.debug.metrics as metrics
from children import in_process
from helpers import assert_keeps_nothing, pointer
from torch_xla import _XLAC
from torch_xla._dynamo import config

import torch_xla_donate
from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    _compile,
    cancel_donation,
    donate_buffer,
    donation_disabled,
    donation_report,
    hlo,
    is_donated,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _notices_taken():
    torch._dynamo.reset()
    yield
    _C.wait_for_steps()
    _C.take_notices()


def openxla(f, **options):
    return torch_xla_donate.compile(f, backend="openxla", **options)


def give_away(f, **options):
    return openxla(f, donate_argnums=0, **options)


def last_reason():
    return donation_report(steps=1).donors[-1].reason


def whole_copy(t):
    """Another tensor that shares the buffer."""
    copy = torch.empty_like(t)
    copy.copy_(t)
    torch_xla.sync(wait=True)
    return copy


# --- What is given away ---


def test_a_loop_consumes_its_arguments_and_compiles_once(make):
    g = give_away(lambda x: x * 2 + 1)
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
    with pytest.raises(DonatedBufferError, match="test_openxla.py"):
        x + 1


def test_a_tensor_that_was_not_offered_is_never_destroyed(make):
    def f(x, y):
        return x * 2 + 1, y + 1

    g, plain = give_away(f), torch.compile(f, backend="openxla")
    a, b = make(4), make(4)
    g(a, b)
    assert is_donated(a)
    assert b.tolist() == [0, 1, 2, 3]
    donate_buffer(b)  # means the next step
    g(make(4), b)
    assert b.tolist() == [0, 1, 2, 3]
    cancel_donation(b)
    a = make(4)
    donate_buffer(a)
    for _ in range(2):
        plain(a, b)
        assert a.tolist() == b.tolist() == [0, 1, 2, 3]
    assert len(_C.pending()) == 1
    cancel_donation(a)
    for argument in (make(4), a):
        plain(argument, b)
        assert argument.tolist() == [0, 1, 2, 3]


def test_dynamic_shapes(make):
    g = give_away(lambda x: x * 2 + x.shape[0], dynamic=True)
    for n in (3, 5, 7, 3, 9):
        x = make(n)
        assert g(x).tolist() == [2 * i + n for i in range(n)]
        assert is_donated(x)
    h = give_away(lambda x, k: x * k, dynamic=True)
    for k in (2, 3, 4, 2):
        x = make(4)
        assert h(x, k).tolist() == [0, k, 2 * k, 3 * k]
        assert is_donated(x)


def test_our_wrapping_adds_no_recompilation(make):
    from torch._dynamo.utils import counters

    g = give_away(lambda x, s: x * s)
    before = counters["stats"]["unique_graphs"]
    for _ in range(3):
        g(make(3), make(3))
    with donation_disabled():
        g(make(3), make(3))
    a = make(3)
    b = whole_copy(a)
    g(a, make(3))
    g(make(3) * 2, make(3))
    assert counters["stats"]["unique_graphs"] == before + 1
    assert b.tolist() == [0, 1, 2]


@pytest.mark.parametrize("skip", [False, True])
def test_skip_input_data_check(make, skip, monkeypatch):
    monkeypatch.setattr(config, "skip_input_data_check", skip)
    g = give_away(lambda x, y: x * 2 + y)
    for _ in range(2):
        x, y = make(3), make(3)
        first = g(x, y)
        assert g(first, make(3)).tolist() == [0, 7, 14]
        assert is_donated(x)
        assert is_donated(first)
    assert g(make(3) * 3, make(3)).tolist() == [0, 7, 14]


@pytest.mark.parametrize("donated", [0, 1, (0, 1)])
def test_updates_of_arguments_in_place(make, donated):
    def f(x, y):
        x.add_(y)
        return x * 2

    g = openxla(f, donate_argnums=donated)
    for _ in range(3):
        x, y = make(3), make(3)
        assert g(x, y).tolist() == [0, 4, 8]
        assert x.tolist() == [0, 2, 4]
        assert is_donated(y) or y.tolist() == [0, 1, 2]


def test_lifted_parameters_stay_and_their_updates_are_seen(make):
    module = torch.nn.Linear(3, 3).to("xla")
    with torch.no_grad():
        for g in (give_away(lambda x: module(x) * 1), give_away(module)):
            for _ in range(2):
                x = make(3, 3)
                expected = module(x).cpu()
                assert torch.allclose(g(x).cpu(), expected)
                assert is_donated(x)
                module.weight.add_(1)
        assert module.weight.cpu().shape == (3, 3)


def test_a_module_is_given_away_with_its_parameters(make):
    g = give_away(lambda module, x: [p.detach() - 0.1 * x.sum() for p in module.parameters()])
    module = torch.nn.Linear(3, 3).to("xla")
    x = make(2, 3)
    expected = [(p.detach() - 0.1 * x.sum()).cpu() for p in module.parameters()]
    assert all(torch.allclose(a.cpu(), b) for a, b in zip(g(module, x), expected))
    assert all(is_donated(p) for p in module.parameters())


def _callables():
    @torch.no_grad()
    def without_gradients(x):
        return x * 3

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

    def nesting(x):
        def inner(y):
            return y * 3

        return inner(x)

    functions = [without_gradients, Callable(), Callable().method, Module(), Module().forward, looping, nesting]
    return [*functions, functools.partial(torch.mul, other=3)]


@pytest.mark.parametrize("f", _callables(), ids=lambda f: type(f).__name__ + getattr(f, "__name__", ""))
def test_every_kind_of_callable_is_recognised_as_a_whole(make, f):
    x = make(3)
    assert give_away(f)(x).tolist() == [0, 3, 6]
    assert is_donated(x), last_reason()


def test_marks_of_donate_buffer_and_donation_disabled(make):
    g = give_away(lambda x: x + 1)
    for _ in range(2):
        x = make(3)
        with donation_disabled():
            assert g(x).tolist() == [1, 2, 3]
        assert not is_donated(x)
        donate_buffer(x)
        assert g(x).tolist() == [1, 2, 3]
        assert is_donated(x)
        assert _C.pending() == []


# --- What is not ---


def test_aliases_and_copies_passed_twice(make):
    for first in (False, True):
        g = openxla(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1))
        if first:
            g(make(4), make(4))
        for partner in (whole_copy, lambda a: a.detach(), lambda a: a):
            a = make(4)
            more, double = g(a, partner(a))
            assert (more.tolist(), double.tolist()) == ([1, 2, 3, 4], [0, 2, 4, 6])
        assert g(make(4), make(4) + 3)[1].tolist() == [6, 8, 10, 12]


def test_a_cached_constant_is_never_destroyed(make):
    g = give_away(lambda s, x: (s + 1, x + s))
    for value in (42.0, 43.0, 42.0):
        s = torch.tensor(value, device="xla")
        total, moved = g(s, make(3))
        assert (total.item(), s.item()) == (value + 1, value)
        assert moved.tolist() == [value, value + 1, value + 2]
    assert torch.tensor(42.0, device="xla").item() == 42
    assert last_reason() == "torch_xla shares this buffer between tensors (a cached constant)"


def test_a_graph_break_donates_nothing(make):
    def f(x):
        y = x * 2
        torch._dynamo.graph_break()
        return y + x

    g = give_away(f)
    for _ in range(2):
        x = make(3)
        assert g(x).tolist() == [0, 3, 6]
        assert not is_donated(x)
        assert "broke the function's graph" in last_reason()


def test_operations_on_the_host_donate_nothing(make):
    first = give_away(lambda x: (x * 3 + torch.histc(x, 4, 0, 10).sum() * 0,))
    last = give_away(lambda x: (x * 3, torch.histc(x, 4, 0, 10)))
    for g in (first, last):
        for _ in range(2):
            x = make(4)
            assert g(x)[0].tolist() == [0, 3, 6, 9]
            assert not is_donated(x)
            assert "operations that run on the host" in last_reason()


def test_hooks_and_functions_without_a_graph_donate_nothing(make):
    class Module(torch.nn.Module):
        def forward(self, x):
            return x * 2

    module = Module()
    module.register_forward_hook(lambda module, inputs, output: output + inputs[0])
    x = make(3)
    assert give_away(module)(x).tolist() == [0, 3, 6]
    assert not is_donated(x)
    assert "hooks" in last_reason()

    @torch.compiler.disable
    def disabled(x):
        return x * 2

    assert give_away(disabled)(x).tolist() == [0, 2, 4]
    assert not is_donated(x)
    assert "did not compile the whole function" in last_reason()


NO_GRAPH = "torch.compile compiled no graph of the function, and code outside a graph may read it"


def test_the_report_knows_reads_outside_a_graph_from_no_reads(make):
    @torch.compiler.disable
    def outside(x):
        return x * 2

    def first_broken(x, y):
        y = y + 1
        return outside(x) + y

    for f, reason in (
        (lambda x, y: outside(x), NO_GRAPH),
        (first_broken, "torch.compile broke the function's graph, and the code after the break may read it"),
        (lambda x, y: y + 1, "not read by the step"),
    ):
        g = give_away(f)
        for _ in range(2):
            x = make(3)
            g(x, make(3))
            assert not is_donated(x)
            assert last_reason() == reason


def test_what_the_backward_pass_needs_stays(make):
    w = make(3).requires_grad_()
    needed, free = give_away(lambda x, w: x * w), give_away(lambda x, w: (x + 1) * w)
    for _ in range(2):
        x = make(3)
        w.grad = None
        needed(x, w).sum().backward()
        assert w.grad.tolist() == [0, 1, 2]
        assert not is_donated(x)
        w.grad = None
        free(x, w).sum().backward()
        assert w.grad.tolist() == [1, 2, 3]
        assert is_donated(x)


def test_a_backward_pass_after_the_donation_names_it(make):
    w = make(3).requires_grad_()
    y = (w * w).sum()
    torch_xla.sync()
    g = give_away(lambda x: x.detach() * 2)
    assert g(w).tolist() == [0, 2, 4]
    if is_donated(w):
        with pytest.raises(DonatedBufferError, match="was donated at"):
            y.backward()


def test_pending_work_that_reads_the_argument_runs_first(make):
    for warm in (False, True):
        g = give_away(lambda x: x + 1)
        if warm:
            g(make(3))
        other = make(4) + 7
        for read in (lambda x: x * 5, lambda x: x.view(3, 1) * 5, lambda x: x[1:] * 5, lambda x: x.detach() * 5):
            x = make(3)
            pending = read(x)
            assert g(x).tolist() == [1, 2, 3]
            assert pending.flatten().tolist() in ([0, 5, 10], [5, 10])
            assert is_donated(x)
        assert other.tolist() == [7, 8, 9, 10]


def test_a_buffer_that_an_unoffered_tensor_holds_stays(make):
    g = give_away(lambda x: x + 1)
    x = make(3)
    other = whole_copy(x)
    assert g(x).tolist() == [1, 2, 3]
    assert other.tolist() == x.tolist() == [0, 1, 2]


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


def test_an_argument_that_is_not_read_stays_and_strict_raises(make):
    y = make(5)
    openxla(lambda x, y: x + 1, donate_argnums=(0, 1))(make(3), y)
    assert y.tolist() == [0, 1, 2, 3, 4]
    assert last_reason() == "not read by the step"
    g, x = give_away(lambda x: x.sum(), strict=True), make(3)

    def call_until_told():
        for _ in range(2):
            g(x)
            _C.wait_for_steps()

    with pytest.raises(DonationError, match="not usable") as raised:
        call_until_told()
    assert raised.value.result.item() == 3
    assert x.tolist() == [0, 1, 2]


def test_errors_take_the_marks_back_and_the_next_call_is_fine(make):
    def f(x):
        raise KeyError("boom")

    x, pending = make(3, 2), make(3) + 7
    with pytest.raises(Exception, match="boom"):
        give_away(f)(x)
    g = give_away(lambda x: x @ x)
    with pytest.raises(Exception, match="reduction dim"):
        g(x)
    assert _C.pending() == []
    assert (x.tolist(), pending.tolist()) == ([[0, 1], [2, 3], [4, 5]], [7, 8, 9])
    x = make(2, 2)
    assert g(x).tolist() == [[2, 3], [6, 11]]
    assert is_donated(x)


def test_a_nested_call_is_a_part_of_the_outer_one(make):
    inner = give_away(lambda x: x + 1)

    def both(x):
        return inner(x), x * 2

    for outer in (openxla(both), torch_xla_donate.compile(both), torch.compile(both, backend="openxla")):
        x = make(3)
        assert outer(x)[0].tolist() == [1, 2, 3]
        assert not is_donated(x)


# --- Results ---


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x,
        lambda x: (x, x + 1),
        lambda x: {"a": x.view(-1), "b": (x.view(2, 2),)},
        lambda x: (x[None], x + 1),
        lambda x: x.contiguous(),
        lambda x: (x + 1,) * 2,
        lambda x: None,
        lambda x: 5,
        lambda x: (torch.zeros(4, device=x.device), x.shape),
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


def test_random_numbers_go_on(make):
    g = give_away(lambda x: x * 0 + torch.rand_like(x))
    assert len({str(g(make(4)).tolist()) for _ in range(4)}) == 4


# --- Memory, threads, the proof ---


def test_a_graph_keeps_no_argument_alive(make):
    """The registry stays flat."""
    g, one = give_away(lambda x, y: x + y), make(10)
    assert_keeps_nothing(g, one, make)


def test_calls_from_several_threads_in_turn(make):
    g, lock, errors = give_away(lambda x: x + 1), threading.Lock(), []
    g(make(3))

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
    assert _XLAC._get_allow_execution()


@in_process
def test_each_set_of_donors_has_a_graph_which_names_them(dump_folder):
    g = give_away(lambda x, y: (x + 1, y + 1))
    for off in (False, True, False):
        x, y = torch.ones(3).to("xla"), torch.ones(5).to("xla")
        torch_xla.sync()
        with donation_disabled() if off else contextlib.nullcontext():
            g(x, y)
    torch_xla.sync(wait=True)
    found = [module for module in hlo.read_dump(dump_folder) if module.donors or module.aliases]
    assert len(found) == 1
    assert [found[0].shape_of(donor).dims for donor in found[0].donors] == [(3,)]
    assert [found[0].shape_of(alias).dims for alias in found[0].aliases] == [(3,)]


def test_a_break_beside_parameters_that_a_graph_does_not_read():
    """An LSTM's functional step: to look at the captured frame must not add inputs to the graph."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 6, batch_first=True)

    def step(state, x):
        weights = {name: value.detach().requires_grad_() for name, value in state["weights"].items()}
        zeros = (torch.zeros(1, 2, 6, device=x.device), torch.zeros(1, 2, 6, device=x.device))
        loss = torch.func.functional_call(lstm, weights, (x, zeros))[0].pow(2).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            momenta = {name: 0.9 * state["momenta"][name] + 0.1 * g for name, g in zip(weights, gradients)}
            weights = {name: value.detach() - 0.5 * momenta[name] for name, value in weights.items()}
        return {"weights": weights, "momenta": momenta}, loss.detach()

    batches = [torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    losses = {}
    for device in ("cpu", "xla"):
        run = step if device == "cpu" else openxla(step, donate_argnums=0)
        weights = {name: value.detach().clone().to(device) for name, value in lstm.named_parameters()}
        state = {"weights": weights, "momenta": {name: torch.zeros_like(value) for name, value in weights.items()}}
        torch_xla.sync(wait=True)
        losses[device] = []
        for batch in batches:
            state, loss = run(state, batch.to(device))
            losses[device].append(loss.item())
    assert losses["xla"] == pytest.approx(losses["cpu"], rel=1e-5)


def test_inputs_that_torch_compile_does_not_report_are_unknown():
    """A graph outside torch.compile has no metadata, like one with inputs that torch.compile has added."""
    graph = torch.fx.symbolic_trace(lambda x, y: (x, x + y))
    assert _compile.openxla._handed_on(graph, graph.graph.find_nodes(op="placeholder")) is None


def decayed(weights, gradients, momenta):
    momenta = {name: 0.9 * momenta[name] + 0.1 * gradients[name] for name in weights}
    return {name: weights[name] - 0.5 * momenta[name] for name in weights}, momenta


def test_pending_gradients_do_not_take_the_donation_of_the_run():
    """The graph after a break gets arguments that are pending; torch_xla runs what they wait for before it."""
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 6, batch_first=True)

    def loss_of(weights, x):
        zeros = (torch.zeros(1, 2, 6, device=x.device), torch.zeros(1, 2, 6, device=x.device))
        return torch.func.functional_call(lstm, weights, (x, zeros))[0].pow(2).mean()

    def step(state, x):
        weights = {name: value.detach().requires_grad_() for name, value in state["weights"].items()}
        loss = loss_of({**weights}, x)
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        with torch.no_grad():
            weights = {name: value.detach() for name, value in weights.items()}
            weights, momenta = decayed(weights, gradients, state["momenta"])
        return {"weights": weights, "momenta": momenta}, loss.detach()

    f = openxla(step, donate_argnums=0)
    weights = {name: value.detach().clone().to("xla") for name, value in lstm.named_parameters()}
    state = {"weights": weights, "momenta": {name: torch.zeros_like(value) for name, value in weights.items()}}
    torch_xla.sync(wait=True)
    for i in range(3):
        old = state
        state, _ = f(state, torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)).to("xla"))
        outcomes = {(donor.outcome, donor.reason) for donor in donation_report(steps=1).donors}
        assert outcomes == {("donated", "")}
        assert all(is_donated(value) for tree in old.values() for value in tree.values())


@pytest.mark.parametrize("is_argument", [False, True], ids=["result", "argument"])
def test_a_value_and_its_clone_are_two_results(make, is_argument):
    """torch_xla's bridge returns one tensor for both: to donate one would consume the other."""

    def f(a, b):
        value = b if is_argument else a + b
        return value.clone(), value

    step = openxla(f, donate_argnums=0)
    b = make(3)
    first, value = step(make(3), b)
    assert first is not value
    second, _ = step(first, b)
    assert value.tolist() == ([0, 1, 2] if is_argument else [0, 2, 4])
    assert second.tolist() == ([0, 1, 2] if is_argument else [0, 3, 6])
    assert b.tolist() == [0, 1, 2]


def test_a_result_and_its_detached_alias_share_what_is_written():
    def f(x):
        value = x.flip(0)
        return value.detach(), value

    def totals(call, device):
        x = torch.arange(9.0).reshape(3, 3).to(device)
        found = []
        for _ in range(3):
            torch_xla.sync()
            alias, x = call(x)
            alias[1] += 9.0
            found.append((alias.tolist(), x.tolist()))
        return found

    assert totals(openxla(f, donate_argnums=0), "xla") == totals(f, "cpu")


def test_a_graph_of_views_is_computed_from_the_views():
    """A mark makes views be computed again from their base, which a graph that is extracted then must not contain."""

    def f(a, b, c):
        return (b.t(), c, c), a.t() + a

    def totals(call, device):
        a = torch.arange(9.0).reshape(3, 3).to(device)
        state, found = (a, a.data, a.t()), []
        torch_xla.sync()
        for _ in range(4):
            state, total = call(*state)
            found.append(total.tolist())
        return found

    assert totals(openxla(f, donate_argnums=(0, 1, 2)), "xla") == totals(f, "cpu")


@pytest.mark.parametrize("donated", [(), (0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize(
    "copy",
    [
        lambda a, b: a.copy_(b),
        lambda a, b: a.__setitem__(slice(None), b),
        lambda a, b: torch._foreach_copy_([a], [b]),
        lambda a, b: a.copy_(b[:1]),
        lambda a, b: a.copy_(b.int()),
        lambda a, b: (a.copy_(a + 1), a.copy_(a * b)),
        lambda a, b: (torch._foreach_copy_([a], [b]), a.copy_(b + a)),
    ],
    ids=["copy_", "slice", "foreach", "broadcast", "cast", "twice", "foreach_twice"],
)
def test_a_whole_copy_of_an_argument_is_a_new_value(copy, donated):
    """torch_xla's functional copy writes into its first operand, which misled the bridge."""

    def f(a, b):
        copy(a, b)
        b.add_(1)
        return a - b, b * 2

    def f_of_state(a, b):
        results = f(a, b)
        return *results, a, b

    def values(step, device):
        a, b = torch.zeros(2, 3).to(device), torch.ones(2, 3).to(device)
        found = []
        for i in range(4):
            if device == "xla":
                torch_xla.sync()
            *results, a, b = step(a, b)
            found.append([one.tolist() for one in (*results, a, b)])
            b = b + i
        return found

    def in_place(call):
        return lambda a, b: (*call(a, b), a, b)

    assert values(in_place(openxla(f)), "xla") == values(in_place(f), "cpu")
    assert values(openxla(f_of_state, donate_argnums=donated), "xla") == values(f_of_state, "cpu")


def test_arguments_that_are_swapped_in_place():
    def swap(a, b):
        before = a.clone()
        a.copy_(b)
        b.copy_(before)
        return a - b

    def values(call, device):
        a, b = torch.arange(4.0).to(device), torch.full((4,), 2.0).to(device)
        return [[one.tolist() for one in (call(a, b), a, b)] for _ in range(3)]

    assert values(openxla(swap), "xla") == values(swap, "cpu")


@torch._dynamo.disable
def outside(x, kept):
    kept.append(x.sum())
    return x * 3


def test_work_outside_the_graph_reads_the_donor_first():
    """Dynamo leaves a disabled function out. Its pending results read the argument that the graph consumes."""
    kept = []
    step = openxla(lambda x: (outside(x, kept), x + 1), donate_argnums=0)
    x = torch.ones(4).to("xla")
    for i in range(1, 4):
        tripled, x = step(x)
        assert tripled.tolist() == [3.0 * i] * 4
        assert x.tolist() == [i + 1.0] * 4
    assert [total.item() for total in kept] == [4.0, 8.0, 12.0]


def test_a_copy_kept_outside_the_graph_has_its_value():
    kept = []
    keep = torch._dynamo.disable(lambda x: kept.append(x.clone()))
    step = openxla(lambda x: (keep(x), x + 1)[1], donate_argnums=0)
    x = torch.ones(4).to("xla")
    for _ in range(3):
        x = step(x)
    assert [one.tolist() for one in kept] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]
    assert x.tolist() == [4.0] * 4


def test_batch_norm_with_a_cumulative_average():
    def run(device):
        norm = torch.nn.BatchNorm1d(3, momentum=None, affine=False).to(device)
        f = lambda x: norm(x) + x  # noqa: E731
        call = openxla(f, donate_argnums=0) if device == "xla" else f
        x = torch.arange(12.0).reshape(4, 3).to(device)
        for _ in range(3):
            x = call(x)
        return x.cpu(), norm.running_mean.cpu(), norm.num_batches_tracked.item()

    (x, mean, count), (expected, expected_mean, expected_count) = run("xla"), run("cpu")
    assert torch.allclose(x, expected, atol=1e-5)
    assert torch.allclose(mean, expected_mean, atol=1e-5)
    assert count == expected_count


@dataclasses.dataclass
class Weights:
    now: torch.Tensor
    before: torch.Tensor


torch.utils._pytree.register_dataclass(Weights)


def test_a_registered_dataclass_among_the_results(make):
    step = openxla(lambda state, x: Weights(state.now * 2, x), donate_argnums=(0, 1))
    state = Weights(make(3), make(3) + 1)
    for i in range(3):
        x = make(3)
        torch_xla.sync()
        old, state = state, step(state, x)
        assert is_donated(old.now)
        assert not is_donated(x)
        assert state.now.tolist() == [0.0, 2.0 ** (i + 1), 2.0 ** (i + 2)]
        assert state.before.tolist() == [0, 1, 2]
