"""compile(backend="openxla"): each call consumes exactly what it offers, whatever torch.compile has compiled before."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch_xla
from helpers import UNUSABLE_IGNORED, each_trace, last_reasons, whole_copy

import torch_xla_donate
from torch_xla_donate import (
    _C,
    _compile,
    _host,
    cancel_donation,
    compile,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
)

pytestmark = [*UNUSABLE_IGNORED, pytest.mark.usefixtures("no_graphs_kept")]


def openxla(f, **options):
    return torch_xla_donate.compile(f, backend="openxla", **options)


def give_away(f, **options):
    return openxla(f, donate_argnums=0, **options)


# --- What is given away ---


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


def test_dynamic_shapes_and_numbers_donate(make):
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


def test_donation_adds_no_recompilation(make):
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


def test_a_function_that_disables_donation_itself_donates_nothing_after_that(make):
    off = donation_disabled()

    def f(x, w):
        z = w * 2
        off.__enter__()
        return x + z

    x = make(3)
    try:
        assert give_away(f)(x, make(3)).tolist() == [0, 3, 6]
        assert not is_donated(x)
    finally:
        off.__exit__(None, None, None)
    assert x.tolist() == [0, 1, 2]


@pytest.mark.parametrize("donated", [0, 1, (0, 1)])
def test_updates_of_arguments_in_place_are_seen(make, donated):
    def f(x, y):
        x.add_(y)
        return x * 2

    g = openxla(f, donate_argnums=donated)
    for _ in range(3):
        x, y = make(3), make(3)
        assert g(x, y).tolist() == [0, 4, 8]
        assert x.tolist() == [0, 2, 4]
        assert {donor.outcome for donor in donation_report(steps=1).donors} == {"donated"}
        assert is_donated(y) if donated else y.tolist() == [0, 1, 2]


def test_captured_parameters_stay_and_their_updates_are_seen(make):
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


# --- What is not ---


@torch.compiler.disable
def outside(x):
    return x * 3


class Hooked(torch.nn.Module):
    def forward(self, x, y):
        return x * 2


def broken(x, y):
    y = x * 2
    torch._dynamo.graph_break()
    return y + x


def broken_before_the_read(x, y):
    y = y + 1
    return outside(x) + y


def test_code_outside_the_graph_keeps_the_argument(make):
    """The report gives the reason, and knows reads outside a graph from no reads."""
    hooked = Hooked()
    hooked.register_forward_hook(lambda module, inputs, output: output + inputs[0])
    no_graph = "torch.compile compiled no graph of the function, and code outside a graph may read it"
    broken_graph = "torch.compile broke the function's graph, and the code after the break may read it"
    for f, expected, reason in [
        (broken, [0, 3, 6], "broke the function's graph"),
        (broken_before_the_read, [1, 5, 9], broken_graph),
        (lambda x, y: x * 3 + torch.histc(x, 4, 0, 10).sum() * 0, [0, 3, 6], "operations that run on the host"),
        (lambda x, y: (x * 3, torch.histc(x, 4, 0, 10)), [0, 3, 6], "operations that run on the host"),
        (hooked, [0, 3, 6], "hooks"),
        (torch.compiler.disable(lambda x, y: x * 2), [0, 2, 4], "did not compile the whole function"),
        (lambda x, y: outside(x), [0, 3, 6], no_graph),
        (lambda x, y: y + 1, [1, 2, 3], "not read by the step"),
    ]:
        g = give_away(f)
        for _ in range(2):
            x = make(3)
            result = g(x, make(3))
            assert (result[0] if isinstance(result, tuple) else result).tolist() == expected
            assert not is_donated(x)
            assert reason in last_reasons()[-1]


def test_an_error_in_the_search_for_returned_arguments_keeps_them(make, monkeypatch):
    def fail(frame):
        raise LookupError("no frame is running")

    monkeypatch.setattr(_host.CapturedFrame, "values_around", fail)
    step = give_away(lambda x: x * 2)
    for _ in range(2):
        x = make(3)
        assert step(x).tolist() == [0, 2, 4]
        assert not is_donated(x)
        assert "looking for that raised LookupError('no frame is running')" in last_reasons()[-1]


def test_a_graph_of_another_function_consumes_nothing(make):
    """Beyond its limit of recompilations torch.compile runs inner frames by graphs that it has compiled for others."""

    def inner(x):
        return x + 1

    consume, outer = give_away(inner), give_away(lambda x, n: (inner(x), x * n), dynamic=False)
    x = make(3)
    assert consume(x).tolist() == [1, 2, 3] and is_donated(x)
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (2, 3, 4):
            x = make(3)
            assert [t.tolist() for t in outer(x, n)] == [[1, 2, 3], [0, n, 2 * n]]
            assert is_donated(x) is (n == 2)
    assert last_reasons() == ["torch.compile did not compile the whole function, and the rest may read it"]


def test_an_argument_that_backward_needs_is_not_consumed(make):
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


# --- Results ---


def test_random_numbers_differ_from_call_to_call(make):
    g = give_away(lambda x: x * 0 + torch.rand_like(x))
    assert len({str(g(make(4)).tolist()) for _ in range(4)}) == 4


def decayed(weights, gradients, momenta):
    momenta = {name: 0.9 * momenta[name] + 0.1 * gradients[name] for name in weights}
    return {name: weights[name] - 0.5 * momenta[name] for name in weights}, momenta


def step_in_one_frame(lstm):
    """Breaks beside parameters that a graph does not read: to look at the captured frame must not add inputs to it."""

    def step(state, x):
        weights = {name: value.detach().requires_grad_() for name, value in state["weights"].items()}
        zeros = (torch.zeros(1, 2, 6, device=x.device), torch.zeros(1, 2, 6, device=x.device))
        loss = torch.func.functional_call(lstm, weights, (x, zeros))[0].pow(2).mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            momenta = {name: 0.9 * state["momenta"][name] + 0.1 * g for name, g in zip(weights, gradients)}
            weights = {name: value.detach() - 0.5 * momenta[name] for name, value in weights.items()}
        return {"weights": weights, "momenta": momenta}, loss.detach()

    return step


def step_that_calls(lstm):
    """The graph after the break gets arguments that are pending; torch_xla runs what they wait for before it."""

    # A function, because Python 3.12 has comprehensions in the frame around them, and torch.compile skips a frame that
    # breaks in a loop.
    def trained(weights):
        return {name: value.detach().requires_grad_() for name, value in weights.items()}

    def loss_of(weights, x):
        zeros = (torch.zeros(1, 2, 6, device=x.device), torch.zeros(1, 2, 6, device=x.device))
        return torch.func.functional_call(lstm, weights, (x, zeros))[0].pow(2).mean()

    def step(state, x):
        weights = trained(state["weights"])
        loss = loss_of({**weights}, x)
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()))))
        with torch.no_grad():
            weights = {name: value.detach() for name, value in weights.items()}
            weights, momenta = decayed(weights, gradients, state["momenta"])
        return {"weights": weights, "momenta": momenta}, loss.detach()

    return step


@pytest.mark.parametrize("make_step", [step_in_one_frame, step_that_calls])
def test_a_functional_step_of_an_lstm(make_step):
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(4, 6, batch_first=True)
    step = make_step(lstm)
    batches = [torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]

    def run(call, device):
        weights = {name: value.detach().clone().to(device) for name, value in lstm.named_parameters()}
        state = {"weights": weights, "momenta": {name: torch.zeros_like(value) for name, value in weights.items()}}
        torch_xla.sync(wait=True)
        losses = []
        for batch in batches:
            old = state
            state, loss = call(state, batch.to(device))
            losses.append(loss.item())
            if device == "xla" and make_step is step_that_calls:
                assert {donor.reason for donor in donation_report(steps=1).donors} == {""}
                assert all(is_donated(value) for tree in old.values() for value in tree.values())
        return losses

    assert run(give_away(step), "xla") == pytest.approx(run(step, "cpu"), rel=1e-5)


def test_inputs_without_metadata_of_torch_compile_are_unknown():
    """A graph outside torch.compile has no metadata, like one with inputs that torch.compile has added."""
    graph = torch.fx.symbolic_trace(lambda x, y: (x, x + y))
    assert _compile.openxla._handed_on(graph, graph.graph.find_nodes(op="placeholder")) is None


@pytest.mark.parametrize("is_argument", [False, True], ids=["result", "argument"])
def test_a_value_and_its_clone_are_two_results(make, is_argument):
    """To donate one must not consume the other."""

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


def value_then_clone(x):
    y = x + 1
    return y, y.clone(), y * 3


def two_clones(x):
    y = x + 1
    return y.clone(), y.clone(), y * 3


def argument_and_clone(x):
    ones = torch.ones((3, 3), device=x.device)
    ones[0] = 0
    alias = x.detach()
    return ones, x, alias, alias.clone()


def argument_beside_a_constant(x):
    ones = torch.ones((3, 3), device=x.device)
    ones[0] = 0
    return ones, x.detach()


def updated_between_clones(x):
    before = x.clone()
    x.add_(1)
    return before, x.clone(), x, x * 2


def alias_of_an_updated_argument(x):
    alias = x.detach()
    clone = alias.clone()
    x.mul_(2)
    return alias, clone, x, x.clone(), x * 3


@pytest.mark.parametrize("donated", [(), 0], ids=["kept", "donated"])
@pytest.mark.parametrize(
    "f",
    [
        value_then_clone,
        two_clones,
        argument_and_clone,
        argument_beside_a_constant,
        updated_between_clones,
        alias_of_an_updated_argument,
    ],
)
def test_results_with_one_value_are_not_taken_for_each_other(make, f, donated):
    step = openxla(f, donate_argnums=donated)
    for _ in range(2):
        expected = [value.tolist() for value in f(torch.arange(3.0))]
        assert [value.tolist() for value in step(make(3))] == expected


def result_beside_the_constant(x, s):
    return x * 6.5, x + s


def constant_is_a_result(x, s):
    return x + s, torch.full((), 6.5, device=x.device), x * 2


@each_trace
@pytest.mark.parametrize("donated", [(), 0, (0, 1)], ids=["kept", "donated", "both_donated"])
@pytest.mark.parametrize("f", [result_beside_the_constant, constant_is_a_result])
def test_an_argument_that_shares_a_constant_of_the_graph(make, f, donated, options):
    """torch_xla has one buffer for both: the constant would follow the argument of later calls."""
    step = compile(f, donate_argnums=donated, **options)
    for number in (6.5, 2.5):
        x, s = make(3), torch.full((), number, device="xla")
        torch_xla.sync()
        expected = [value.tolist() for value in f(torch.arange(3.0), torch.full((), number))]
        assert [value.tolist() for value in step(x, s)] == expected


def test_a_donated_constant_may_be_cancelled_or_given_to_a_scan(make):
    def cancelled(x, s):
        cancel_donation(s)
        return x + s

    def scanned(s, xs):
        return torch_xla_donate.scan(lambda carry, x: (carry + x, carry * x), s, xs, donate="init")

    s = torch.full((), 6.5, device="xla")
    assert compile(cancelled, donate_argnums=(0, 1), strict="error")(make(3), s).tolist() == [6.5, 7.5, 8.5]
    carry, ys = compile(scanned, pure=True, donate_argnums=0)(s, make(3))
    assert (carry.item(), ys.tolist()) == (9.5, [0, 6.5, 15])


def test_a_result_that_is_a_view_of_a_consumed_argument(make):
    def f(base, view, x):
        return base - 2 * x, view, view.view_as(view)

    step = openxla(f, donate_argnums=(0, 1))
    base = make(4)
    view = base.unsqueeze(0)
    for expected in ([0, -1, -2, -3], [0, -3, -6, -9]):
        base, view, again = step(base, view, make(4))
        assert base.tolist() == expected
        assert view.tolist() == again.tolist() == [[0, 1, 2, 3]]


def test_a_number_from_the_host_inside_a_graph(make):
    def f(x, count):
        number = count.item()
        torch._check(number >= 0)
        return x.clone(), x.clone(), x * number, x * number + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        step = openxla(f, donate_argnums=())
        for number in (2, 3, 2):
            expected = [value.tolist() for value in f(torch.arange(3.0), torch.tensor(number))]
            assert [value.tolist() for value in step(make(3), torch.tensor(number).to("xla"))] == expected


def test_operations_of_users_that_read_on_the_host_or_update_an_argument(custom_operations):
    doubled, increased = custom_operations
    for f, outcome in (
        (lambda x: doubled(x) + 1, "unusable"),
        (lambda x: doubled(x), "unusable"),
        (lambda x: (increased(x), x * 2)[1], "donated"),
    ):
        for donated in ((), 0):
            step = openxla(f, donate_argnums=donated)
            for first in (0.0, 5.0):
                x = (torch.arange(3.0) + first).to("xla")
                torch_xla.sync()
                assert step(x).tolist() == f(torch.arange(3.0) + first).tolist()
                if donated != ():
                    assert [donor.outcome for donor in donation_report(steps=1).donors] == [outcome]


def test_tensors_that_an_operation_of_a_user_keeps_from_the_trace(make):
    kept = []

    @torch.library.custom_op(
        "torch_xla_donate_tests::keeps", mutates_args=(), schema="(Tensor x, bool itself) -> Tensor"
    )
    def keeps(x, itself):
        if not kept:
            kept.append(x.detach() if itself else x * 2)
        return x + 1

    keeps.register_fake(lambda x, itself: torch.empty_like(x))
    for itself, outcomes in ((False, ["donated", "donated"]), (True, ["unusable", "donated"])):
        kept.clear()
        step, found = openxla(lambda x, itself=itself: keeps(x, itself), donate_argnums=0), []
        for first in (0.0, 5.0):
            x = torch.arange(3.0).add(first).to("xla")
            torch_xla.sync()
            assert step(x).tolist() == [first + 1, first + 2, first + 3]
            found += [donor.outcome for donor in donation_report(steps=1).donors]
        assert found == outcomes
        assert kept[0].tolist() == ([0.0, 1.0, 2.0] if itself else [0.0, 2.0, 4.0])


def test_what_an_operation_keeps_after_pending_work_has_run_is_found(make):
    """Before the call pending work reads the argument, in the trace the operation keeps a part of it."""
    kept = []

    @torch.library.custom_op("torch_xla_donate_tests::keeps_a_part", mutates_args=())
    def keeps_a_part(x: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(x[1:])
        return x * 2

    keeps_a_part.register_fake(torch.empty_like)
    x = make(3)
    work = x + 1
    assert give_away(lambda x: keeps_a_part(x))(x).tolist() == [0, 2, 4]
    assert (kept[0].tolist(), work.tolist()) == ([1, 2], [1, 2, 3])


def test_random_numbers_count_when_an_operation_draws_them_again(make):
    """Those of the first trace may be another thread's."""
    calls = []

    @torch.library.custom_op("torch_xla_donate_tests::draws_at_first", mutates_args=())
    def draws_at_first(x: torch.Tensor, calls_that_draw: int) -> torch.Tensor:
        calls.append(len(calls))
        if calls[-1] < calls_that_draw:
            torch.rand(1)
        return x + 1

    draws_at_first.register_fake(lambda x, calls_that_draw: torch.empty_like(x))
    for draws, outcomes, count in ((1, ["unusable", "donated", "donated"], 3), (9, ["unusable"] * 3, 5)):
        calls.clear()
        step, found = give_away(lambda x, draws=draws: draws_at_first(x, draws)), []
        for _ in range(3):
            assert step(make(3)).tolist() == [1, 2, 3]
            found += [donor.outcome for donor in donation_report(steps=1).donors]
        assert (found, len(calls)) == (outcomes, count)  # the second trace that draws is the last


def test_a_compiled_module_inside_a_function(make):
    module = compile(torch.nn.Linear(2, 2).to("xla").requires_grad_(False))
    step = give_away(lambda s, x: s + module(x))
    s, x = make(1, 2), make(1, 2)
    torch_xla.sync()
    result = step(s, x)
    assert is_donated(s)
    torch.testing.assert_close(result, make(1, 2) + module(x))


def test_a_constant_beside_a_dynamic_size(make):
    step = openxla(lambda x: (torch.tensor([1.0, 2.0], device=x.device), x + x.shape[0]), dynamic=True)
    for n in (3, 4):
        assert [one.tolist() for one in step(make(n))] == [[1, 2], [i + n for i in range(n)]]


def test_a_result_and_its_detached_alias_share_what_is_written():
    def f(x):
        value = x.flip(0)
        return value.detach(), value

    def run(call, device):
        x = torch.arange(9.0).reshape(3, 3).to(device)
        found = []
        for _ in range(3):
            torch_xla.sync()
            given = x
            alias, x = call(x)
            assert device == "cpu" or is_donated(given)
            alias[1] += 9.0
            found.append((alias.tolist(), x.tolist()))
        return found

    assert run(give_away(f), "xla") == run(f, "cpu")


def test_a_view_and_its_base_are_both_donated(make):
    """At the first call torch.compile looks at the arguments."""
    step, base = openxla(lambda view, base: (view + 1, base * 2), donate_argnums=(0, 1), strict=True), make(2, 2)
    view = base.t()
    assert [t.tolist() for t in step(view, base)] == [[[1, 3], [2, 4]], [[0, 2], [4, 6]]]
    assert is_donated(view) and is_donated(base)


def test_a_graph_of_views_is_computed_from_the_views():
    """A mark makes views be computed again from their base, which a graph that is traced then must not contain."""

    def f(a, b, c):
        return (b.t(), c, c), a.t() + a

    def run(call, device):
        a = torch.arange(9.0).reshape(3, 3).to(device)
        state, found = (a, a.data, a.t()), []
        torch_xla.sync()
        for number in range(4):
            given, (state, total) = state, call(*state)
            # The arguments of the first call are one buffer, which is returned.
            assert device == "cpu" or is_donated(given[0]) is (number > 0)
            found.append(total.tolist())
        return found

    assert run(openxla(f, donate_argnums=(0, 1, 2)), "xla") == run(f, "cpu")


COPIES = {
    "copy_": lambda a, b: a.copy_(b),
    "slice": lambda a, b: a.__setitem__(slice(None), b),
    "foreach": lambda a, b: torch._foreach_copy_([a], [b]),
    "broadcast": lambda a, b: a.copy_(b[:1]),
    "cast": lambda a, b: a.copy_(b.int()),
    "twice": lambda a, b: (a.copy_(a + 1), a.copy_(a * b)),
    "foreach twice": lambda a, b: (torch._foreach_copy_([a], [b]), a.copy_(b + a)),
    "swap": lambda a, b: (lambda before: (a.copy_(b), b.copy_(before)))(a.clone()),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_whole_copy_of_an_argument_is_a_new_value(name):
    """torch_xla's functional copy writes into its first operand."""

    def f(a, b):
        COPIES[name](a, b)
        b.add_(1)
        return a - b, b * 2

    def run(step, device):
        a, b = torch.zeros(2, 3).to(device), torch.ones(2, 3).to(device)
        found = []
        for i in range(4):
            if device == "xla":
                torch_xla.sync()
            *results, a, b = step(a, b)
            found.append([one.tolist() for one in (*results, a, b)])
            b = b + i
        return found

    def with_state(call):
        return lambda a, b: (*call(a, b), a, b)

    expected = run(with_state(f), "cpu")
    assert run(with_state(openxla(f)), "xla") == expected  # which updates in place
    assert run(openxla(with_state(f), donate_argnums=(0, 1)), "xla") == expected
    assert {donor.reason_code for donor in donation_report(steps=1).donors} == {"still_needed"}


def test_work_outside_the_graph_reads_the_donor_first():
    """Dynamo leaves a disabled function out. Its pending results read the argument that the graph consumes."""
    sums, copies = [], []

    @torch._dynamo.disable
    def keep(x):
        sums.append(x.sum())
        copies.append(x.clone())
        return x * 3

    step = openxla(lambda x: (keep(x), x + 1), donate_argnums=0)
    x = torch.ones(4).to("xla")
    for i in range(1, 4):
        given = x
        tripled, x = step(x)
        assert is_donated(given)
        assert tripled.tolist() == [3.0 * i] * 4
        assert x.tolist() == [i + 1.0] * 4
    assert [total.item() for total in sums] == [4.0, 8.0, 12.0]
    assert [one.tolist() for one in copies] == [[1.0] * 4, [2.0] * 4, [3.0] * 4]


def test_batch_norm_with_a_cumulative_average():
    def run(device):
        norm = torch.nn.BatchNorm1d(3, momentum=None, affine=False).to(device)
        f = lambda x: norm(x) + x  # noqa: E731
        call = openxla(f, donate_argnums=0) if device == "xla" else f
        x = torch.arange(12.0).reshape(4, 3).to(device)
        for _ in range(3):
            given, x = x, call(x)
            assert device == "cpu" or is_donated(given)
        return x.cpu(), norm.running_mean.cpu(), norm.num_batches_tracked.item()

    (x, mean, count), (expected, expected_mean, expected_count) = run("xla"), run("cpu")
    assert torch.allclose(x, expected, atol=1e-5)
    assert torch.allclose(mean, expected_mean, atol=1e-5)
    assert count == expected_count


def test_a_pending_argument_of_a_call_without_donors_runs_alone(make):
    """Its old value is still read by work that stays pending."""
    step = openxla(lambda x: x * 2)
    for _ in range(2):
        x = make(3)
        total = x + 10
        x += 1
        assert step(x).tolist() == [2, 4, 6]
        assert (total.tolist(), x.tolist()) == ([10, 11, 12], [1, 2, 3])


def test_a_pending_argument_runs_with_the_work_that_reads_its_old_value():
    def uploaded(first):
        return (torch.arange(9.0) + first).reshape(3, 3).to("xla")

    def f(s0, s1, s2, x):
        torch.remainder(s0 * 1, 13)
        return (s1, s1, s2), (s0,)

    g = compile(f, donate_argnums=2, backend="openxla")
    s0 = uploaded(0)
    s1 = s0.detach()
    s2, x = uploaded(1), uploaded(2)
    (s0, s1, s2), (alias,) = g(s0, s1, s2, x)
    s0.copy_(torch.remainder(s0 + 2, 13))  # pending, and so is the row, which reads what it overwrites
    row = alias[0]
    (s0, s1, s2), _ = g(s0, s1, s2, x)
    assert s0[0].tolist() == alias[0].tolist() == row.tolist() == [2, 3, 4]
    assert s2[0].tolist() == [1, 2, 3]
