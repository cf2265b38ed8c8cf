"""compile(f, donate_argnums=...): which arguments are donated, and the errors and warnings of a call."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import pickle
import threading
from dataclasses import dataclass

import pytest
import torch
import torch_xla
from helpers import BACKENDS, Couple, compiles, each_backend, error_of
from torch.utils import _pytree as pytree

import torch_xla_donate
from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    debug_nans,
    donation_disabled,
    donation_report,
    expect_donated,
    is_donated,
)


def add(x, y):
    return x + y


def gone(*tensors):
    return [is_donated(t) for t in tensors]


def names():
    return [donor.name for donor in donation_report(steps=1).donors]


# --- How it is applied ---


def test_it_is_a_decorator_with_and_without_arguments(make):
    @torch_xla_donate.compile(donate_argnums=0)
    def double(x):
        """Twice x."""
        return x * 2

    x = make(3)
    assert torch_xla_donate.compile(double.__wrapped__)(x).tolist() == [0, 2, 4]
    assert torch_xla_donate.compile(double.__wrapped__)(1) == 2
    assert not is_donated(x)
    assert double(x).tolist() == [0, 2, 4]
    assert is_donated(x)
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert list(inspect.signature(double).parameters) == ["x"]
    assert repr(double) == "<LazyCompiled of double>"


def test_a_step_refused_for_max_different_graphs_leaves_no_mark(make):
    f = torch_xla_donate.compile(add, donate_argnums=0, max_different_graphs=1)
    f(make(3), make(3))
    x, y = make(4), make(4)
    with pytest.raises(RuntimeError, match="Maximum number of different graphs"):
        f(x, y)
    assert _C.pending() == []
    assert gone(x, y) == [False, False]
    assert (x + y).tolist() == [0, 2, 4, 6]


# --- Which arguments ---


def any_number(a, *rest, **others):
    return [t + 1 for t in (a, *rest, *others.values())]


def positional_only(a, /, b):
    return a + 1, b + 1


def with_default(a, b=None, *rest):
    return a + 1


class Unsigned:
    """Callable, and its signature cannot be found out."""

    @property
    def __signature__(self):
        raise TypeError("none")

    def __call__(self, *args):
        return [t + 1 for t in args]


def test_numbers_and_names_donate_however_arguments_are_given(make):
    """Each row: a function, options, how many arguments are positional, the names of the others, which are donated."""
    rows = [
        (lambda a, b, c: (a + 1, b + 1, c + 1), options, count, "abc"[count:], expected)
        for options, expected in [
            ({"donate_argnums": 0}, [True, False, False]),
            ({"donate_argnums": (0, 2)}, [True, False, True]),
            ({"donate_argnums": [1]}, [False, True, False]),
            ({"donate_argnums": -1}, [False, False, True]),
            ({"donate_argnums": (-3, 0)}, [True, False, False]),
            ({"donate_argnames": "b"}, [False, True, False]),
            ({"donate_argnames": ("a", "c")}, [True, False, True]),
            ({"donate_argnums": 0, "donate_argnames": "c"}, [True, False, True]),
            ({"donate_argnums": (), "donate_argnames": []}, [False, False, False]),
        ]
        for count in range(4)
    ]
    rows += [
        (any_number, {"donate_argnums": 0}, 3, "k", [True, False, False, False]),
        (any_number, {"donate_argnums": (1, 2)}, 3, "k", [False, True, True, False]),
        (any_number, {"donate_argnums": -1}, 3, "k", [False, False, True, False]),
        (any_number, {"donate_argnames": "k"}, 3, "k", [False, False, False, True]),
        (any_number, {"donate_argnames": ("a", "absent")}, 3, "k", [True, False, False, False]),
        (positional_only, {"donate_argnums": -2}, 1, "b", [True, False]),
        (lambda a, /, **others: (a + 1, others["a"] + 1), {"donate_argnums": 0}, 1, "a", [True, False]),
        (lambda a, *, b: (a + 1, b + 1), {"donate_argnames": "b"}, 1, "b", [False, True]),
        (with_default, {"donate_argnums": (0, 1)}, 1, "", [True]),
        (Unsigned(), {"donate_argnums": 1}, 2, "", [False, True]),
        (torch.neg, {"donate_argnums": 0}, 1, "", [True]),
    ]
    for f, options, count, keywords, expected in rows:
        given = [make(2 + i) for i in range(count + len(keywords))]
        torch_xla_donate.compile(f, **options)(*given[:count], **dict(zip(keywords, given[count:])))
        assert gone(*given) == expected, (f, options, count)
    torch_xla_donate.compile(with_default, donate_argnums=(0, 1))(make(2), None)


def test_a_number_beyond_the_arguments_of_a_call_is_refused(make):
    """The function takes any number of arguments."""
    for number, count in ((2, 2), (-3, 2), (-1, 0)):
        f = torch_xla_donate.compile(lambda *args: [t + 1 for t in args], donate_argnums=number)
        with pytest.raises(ValueError, match=f"argument {number} of <lambda>, but this call has {count} pos"):
            f(*[make(2) for _ in range(count)])
    f = torch_xla_donate.compile(lambda *args: args[0] + 1, donate_argnums=1, static_argnums=-1)
    with pytest.raises(ValueError, match="argument 1 of <lambda> is both static and donated"):
        f(make(2), make(3))


def test_wrong_functions_options_names_and_numbers_are_refused_at_wrapping():
    both = "is both static and donated"
    for f, options, kind, text in [
        (3, {}, TypeError, "f is of type int, which cannot be called"),
        (add, {"backend": "cuda"}, ValueError, """backend is 'cuda'. Pass "lazy" or "openxla"."""),
        (add, {"graphs": 1}, TypeError, "unexpected keyword argument 'graphs'"),
        (add, {"donate_argnums": 2}, ValueError, r"donate_argnums is 2, and 2 is out of range, because add accepts 2"),
        (add, {"donate_argnums": (0, -3)}, ValueError, r"donate_argnums is (0, -3), and -3 is out of range, because"),
        (add, {"static_argnums": 5}, ValueError, r"static_argnums is 5, and 5 is out of range, because add accepts 2"),
        (add, {"donate_argnames": "z"}, ValueError, r"add has no keyword parameter 'z'."),
        (add, {"donate_argnames": "z"}, ValueError, r" parameters: x, y."),
        (add, {"static_argnames": ["x", "z"]}, ValueError, r"static_argnames is ['x', 'z'], but add has no keyword pa"),
        (positional_only, {"donate_argnames": "a"}, ValueError, r"no keyword parameter 'a'."),
        (positional_only, {"donate_argnames": "a"}, ValueError, r" parameters: b."),
        (add, {"donate_argnums": 0, "static_argnums": 0}, ValueError, f"argument x of add {both}"),
        (add, {"donate_argnames": "y", "static_argnums": 1}, ValueError, f"argument y of add {both}"),
        (add, {"donate_argnums": -1, "static_argnames": "y"}, ValueError, f"argument y of add {both}"),
        (
            positional_only,
            {"donate_argnums": 0, "static_argnums": -2},
            ValueError,
            f"argument 0 of positional_only {both}",
        ),
        (Unsigned(), {"donate_argnames": "a"}, ValueError, "Unsigned has no signature to find the names in. Use don"),
        (torch.add, {"donate_argnames": "input"}, ValueError, "add has no signature to find the names in"),
        (add, {"donate_argnums": 1.5}, TypeError, "donate_argnums is 1.5. Pass an int or a sequence of ints"),
        (add, {"pure": "yes"}, TypeError, "pure is of type str, not a bool. Pass True or False."),
        (add, {"donate_argnums": "x"}, TypeError, "donate_argnums is 'x'. Pass an int or a sequence of ints"),
        (add, {"donate_argnames": 3}, TypeError, "donate_argnames is 3. Pass a string or a sequence of strings"),
        (add, {"donate_argnames": (1,)}, TypeError, r"donate_argnames is (1,). Pass a string or a sequence of str"),
    ]:
        found = error_of(kind, torch_xla_donate.compile, f, **options)
        assert text in found, (options, found)


def test_static_arguments_pass_unchanged_and_need_a_hash(make):
    f = torch_xla_donate.compile(lambda x, scale: x * scale[0], donate_argnums=0, static_argnums=1)
    assert f(make(3), (2,)).tolist() == [0, 2, 4]
    x = make(3)
    with pytest.raises(ValueError, match=r"scale \(argument 1 of <lambda>\) is static, but list cannot be hashed"):
        f(x, [2])
    assert x.tolist() == [0, 1, 2]


# --- What is donated of an argument ---


def test_every_tensor_of_a_pytree_is_donated_and_named(make):
    """Numbers, strings and None beside them are passed on."""

    def update(state, delta):
        return pytree.tree_map(lambda t: t + delta if isinstance(t, torch.Tensor) else t, state)

    state = {"w": make(2), "rest": [make(3), (make(4), None)], "scale": 2.0, "mode": "sum"}
    result = torch_xla_donate.compile(update, donate_argnums=0)(state, 1.5)
    assert gone(state["w"], state["rest"][0], state["rest"][1][0]) == [True] * 3
    assert (result["w"].tolist(), result["scale"], result["mode"]) == ([1.5, 2.5], 2.0, "sum")
    assert set(names()) == {
        "state['w'] (argument 0 of update)",
        "state['rest'][0] (argument 0 of update)",
        "state['rest'][1][0] (argument 0 of update)",
    }


def test_a_module_inside_a_pytree_donates_its_tensors(make):
    model = torch.nn.BatchNorm1d(3, track_running_stats=False).to("xla")
    torch_xla.sync()

    @torch_xla_donate.compile(donate_argnames="state")
    def update(*, state):
        return [parameter.detach() + 1 for parameter in state["layer1"].parameters()]

    update(state={"layer1": model})
    assert gone(model.weight, model.bias) == [True, True]
    assert set(names()) == {
        "state['layer1'].weight (argument 'state' of update)",
        "state['layer1'].bias (argument 'state' of update)",
    }
    with pytest.raises(DonatedBufferError, match=r"state\['layer1'\]\.weight \(argument 'state' of update\)"):
        model.weight.sum()


def test_a_module_can_be_the_function(make):
    model = torch.nn.Linear(3, 3).to("xla")
    x = make(3, 3)
    f = torch_xla_donate.compile(model, donate_argnames="input")
    assert f(x).shape == (3, 3)
    assert names() == ["input (argument 0 of Linear)"]
    assert gone(x, model.weight) == [True, False]


def test_training_in_place_donates_and_keeps_every_tensor_usable(make):
    """The state of the optimizer exists since the first step, and is named at the second."""

    def run(donate):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3, bias=False).to("xla")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch_xla.sync()

        def step(opt, x):
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            return loss.detach()

        compiled = torch_xla_donate.compile(step, donate_argnums=0 if donate else ())
        losses, named = [], []
        for _ in range(3):
            losses.append(compiled(optimizer, make(2, 3)).item())
            named.append(sorted(names()))
        assert donation_report(steps=1).reused_fraction == (1 if donate else 0)
        return (losses, model.weight.tolist(), gone(*model.parameters())), named

    expected, _ = run(False)
    found, named = run(True)
    assert found == expected
    parameter, momentum = "opt.param_groups[0]['params'][0]", "opt.state[0]['momentum_buffer']"
    first, both = ([f"{name} (argument 0 of step)" for name in given] for given in ([parameter], [parameter, momentum]))
    assert named == [first, both, both]


@dataclass
class State:
    weight: torch.Tensor
    moment: torch.Tensor


def test_a_dataclass_must_be_registered(make):
    state = State(make(2), make(3))
    f = torch_xla_donate.compile(lambda s: State(s.weight + 1, s.moment + 1), donate_argnums=0)
    for given, name in ((state, "s"), ([state], r"s\[0\]")):
        with pytest.raises(TypeError, match=rf"{name} \(argument 0 of <lambda>\) is of type State, which is neither"):
            f(given)
    assert gone(state.weight, state.moment) == [False, False]
    sized = {"w": make(2), "shape": make(2).shape}  # a torch.Size, which can hold no tensor
    torch_xla_donate.compile(lambda s: s["w"] + 1, donate_argnums=0)(sized)
    assert torch_xla_donate.is_donated(sized["w"])

    pytree.register_dataclass(State)
    f(state)
    assert gone(state.weight, state.moment) == [True, True]
    assert set(names()) == {"s.weight (argument 0 of <lambda>)", "s.moment (argument 0 of <lambda>)"}


@each_backend
def test_leaves_of_a_class_without_keys_are_donated_and_numbered(make, options):
    f = torch_xla_donate.compile(lambda s, t: (s.first + t.first, s.second + t.second), donate_argnums=0, **options)
    state, other = Couple(make(2), make(3)), Couple(make(2), make(3))
    f(state, other)
    assert gone(state.first, state.second) == [True, True]
    assert set(names()) == {"s[0] (argument 0 of <lambda>)", "s[1] (argument 0 of <lambda>)"}
    with pytest.raises(ValueError, match=r"s\[1\] \(argument 0 of <lambda>\) is donated, and t\[0\] \(argument 1 of"):
        f(Couple(make(2), other.second), Couple(other.second, make(3)))
    state = Couple(make(2), torch.ones(3))
    with pytest.raises(ValueError, match=r"s\[1\] \(argument 0 of <lambda>\) is float32\[3\] on cpu.*Nothing was mar"):
        f(state, other)
    assert _C.pending() == [] and not is_donated(state.first)


def test_structures_that_differ_deep_inside_have_own_names(make):
    f = torch_xla_donate.compile(lambda s: [t + 1 for t in s["m"].values()], donate_argnums=0)
    for key in ("first", "second"):
        f({"m": {key: make(2)}})
        assert names() == [f"s['m'][{key!r}] (argument 0 of <lambda>)"]


# --- What the function does with it ---


def test_a_warning_names_unread_and_unusable_arguments_once(make):
    f = torch_xla_donate.compile(lambda x, y: y + 1, donate_argnums=0)
    x = make(3)
    with pytest.warns(DonationWarning) as told:
        for y in (make(2), make(2)):
            f(x, y)
        torch_xla.sync(wait=True)
        donation_report()
        torch_xla.sync(wait=True)
    (warning,) = told
    text = str(warning.message)
    assert text.startswith(f"Some donated buffers were not usable: f32[3] (donated at {__file__}:")
    assert "f32[3] x (argument 0 of <lambda>): not read by the step." in text
    assert warning.filename == __file__
    assert x.tolist() == [0, 1, 2]
    assert _C.pending() == []
    (donor,) = donation_report(steps=1).donors
    assert (donor.outcome, donor.reason) == ("unusable", "not read by the step")
    f = torch_xla_donate.compile(lambda state: state["w"].sum(), donate_argnums=0)
    with pytest.warns(DonationWarning, match=r"f32\[3\] state\['w'\] \(argument 0 of <lambda>\): no output of the"):
        f({"w": make(3)})
        donation_report()


def test_the_environment_makes_calls_strict_by_default(make, monkeypatch):
    monkeypatch.setenv("TORCH_XLA_DONATE_STRICT", "1")
    with pytest.raises(DonationError, match="not read by the step"):
        torch_xla_donate.compile(lambda x: None, donate_argnums=0)(make(2))
    with pytest.warns(DonationWarning, match="not read by the step"):
        torch_xla_donate.compile(lambda x: None, donate_argnums=0, strict=False)(make(2))


def test_a_later_use_raises_with_argument_call_and_function(make):
    x = make(3)
    torch_xla_donate.compile(add, donate_argnums=0)(x, y=make(3))
    with pytest.raises(DonatedBufferError, match=rf"'x \(argument 0 of add\)' was donated at {__file__}:\d+ and"):
        x.sum()
    with pytest.raises(DonatedBufferError, match=r"x \(argument 0 of add\)"):
        torch_xla_donate.compile(add, donate_argnums=0)(x, make(3))


# --- Methods, partials, nothing to donate ---


class Trainer:
    scale = 3

    @torch_xla_donate.compile(donate_argnums=1)
    def step(self, state):
        return state * self.scale

    @staticmethod
    @torch_xla_donate.compile(donate_argnums=0)
    def alone(state):
        return state + 1

    @classmethod
    @torch_xla_donate.compile(donate_argnames="state")
    def of_class(cls, state):
        return state * cls.scale

    def plain(self, state):
        return state * self.scale


def test_methods_are_compiled_in_the_class_and_self_is_argument_0(make):
    trainer, given = Trainer(), [make(2) for _ in range(4)]
    bound = torch_xla_donate.compile(functools.partial(trainer.plain), donate_argnums=0)
    results = [trainer.step(given[0]), trainer.alone(given[1]), Trainer.of_class(given[2]), bound(given[3])]
    assert names() == ["state (argument 0 of plain)"]  # of the partial
    assert [out.tolist() for out in results] == [[0, 3], [1, 2], [0, 3], [0, 3]]
    assert gone(*given) == [True] * 4
    with pytest.raises(DonatedBufferError, match=r"state \(argument 1 of step\)"):
        given[0].sum()


# --- Compiles ---


def test_each_set_of_donors_is_compiled_once(make):
    def update(state, delta):
        return {name: value * 0.5 + delta for name, value in state.items()}

    def count(**options):
        before, state = compiles(), {"a": make(37), "b": make(37)}
        f = torch_xla_donate.compile(update, **options)
        for _ in range(3):
            state = f(state, delta)
        return compiles() - before

    delta = make(37)
    assert [count(), count(donate_argnums=0), count(donate_argnames="state"), count()] == [1, 1, 0, 0]


def added(x):
    return x + 1


module_level = torch_xla_donate.compile(added)
module_level.__qualname__ = "module_level"


@pytest.mark.parametrize("options", [{}, {"pure": True}, {"backend": "openxla"}], ids=str)
def test_the_copy_of_an_object_has_compiled_methods_of_its_own(options, make):
    class Scale(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(make(2), requires_grad=False)
            self.step = torch_xla_donate.compile(self.scale, donate_argnums=0, **options)

        def scale(self, x):
            return x * self.w * (2 if self.training else 1)

    one = Scale()
    one.step(make(2))
    one.step(make(2))
    step = copy.deepcopy(one.step)
    assert step is step.__wrapped__.__self__.step
    other = copy.deepcopy(one).eval()
    other.w.fill_(3)
    x = make(2)
    assert other.step(x).tolist() == [0, 3]
    assert is_donated(x)
    assert one.step(make(2)).tolist() == [0, 2]


def test_a_compiled_function_is_pickled_by_its_name():
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level)(torch.ones(2, device="xla")).tolist() == [2, 2]
    with pytest.raises(TypeError, match="the compiled added cannot be pickled, because 'added' is not its name"):
        pickle.dumps(torch_xla_donate.compile(added))


# --- Functions that return before their body has run ---


def generator(x):
    yield x


async def coroutine(x):
    return x


async def asynchronous_generator(x):
    yield x


class Callable:
    def __call__(self, x):
        yield x

    async def method(self, x):
        return x


class Module(torch.nn.Module):
    async def forward(self, x):
        return x


CASES = {
    "generator is a generator function": generator,
    "coroutine is an async def function": coroutine,
    "asynchronous_generator is an async generator function": asynchronous_generator,
    "Callable is a generator function": Callable(),
    "method is an async def function": Callable().method,
    "Module is an async def function": Module(),
    "generator is a generator function, and a call": functools.partial(generator, 1),
}


def test_functions_that_return_before_their_body_are_refused():
    """By compile() with each backend, and by the decorators."""
    for text, function in CASES.items():
        for options in BACKENDS.values():
            found = error_of(TypeError, torch_xla_donate.compile, function, **options)
            assert text in found and "Compile a function that returns its results" in found, (text, options, found)
        modes = () if isinstance(function, Module) else (donation_disabled, debug_nans, expect_donated)
        for mode in modes:
            found = error_of(TypeError, mode(), function)
            kind, remedy = text.partition(",")[0].partition(" is ")[2], f"`with {mode.__name__}():` inside its body"
            assert f" is {kind}, and" in found and remedy in found, (text, mode, found)
    with pytest.raises(TypeError, match="Compile a function that returns its results"):
        torch_xla_donate.compile(donate_argnums=0)(generator)
    assert donation_disabled()(_C.disabled)()


# --- Autograd's own threads keep gradients into the step at random ---


def gradients(parameters, x, seen):
    leaves = [p.detach().requires_grad_() for p in parameters]
    h = x
    for p in leaves:
        h = torch.tanh(h @ p)
    h.register_hook(lambda gradient: seen.append(threading.get_ident()))
    return torch.autograd.grad(h.pow(2).mean(), leaves)


def model(make):
    sizes = [4, 6, 9, 11, 4]
    return [make(a, b) * 0.01 for a, b in itertools.pairwise(sizes)], make(2, 4)


def test_outside_of_compile_autograd_has_its_own_threads(make):
    """The reason for the other tests."""
    seen = []
    gradients(*model(make), seen)
    assert seen != [threading.get_ident()]
    torch_xla.sync()


@each_backend
def test_compiled_functions_run_autograd_on_their_thread(make, options):
    seen = []
    parameters, x = model(make)
    inner = torch.compiler.disable(gradients) if "backend" in options else gradients

    @torch_xla_donate.compile(**options)
    def f(parameters, x):
        return inner(parameters, x, seen)

    f(parameters, x)
    if "backend" not in options:
        f.lower(parameters, x)
    assert set(seen) == {threading.get_ident()}
    assert torch.autograd.is_multithreading_enabled()


def test_the_setting_of_the_program_comes_back_after_an_error(make):
    def fail(x):
        raise ValueError("no")

    for before in (True, False):
        with torch.autograd.set_multithreading_enabled(before):
            with pytest.raises(ValueError, match="no"):
                torch_xla_donate.compile(fail)(make(2))
            assert torch.autograd.is_multithreading_enabled() is before
