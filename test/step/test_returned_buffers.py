"""No backend consumes a buffer that a function returns unchanged, in any place, alias or tensor object."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import torch
import torch_xla
from helpers import BACKENDS, UNUSABLE_IGNORED, Couple, compiles, consume

from torch_xla_donate import _C, DonatedBufferError, DonationError, _trees, compile, hlo, is_donated

pytestmark = [*UNUSABLE_IGNORED, pytest.mark.usefixtures("no_graphs_kept")]


BACKEND = pytest.mark.parametrize("backend", BACKENDS)


def give_away(f, backend, argnums=0):
    return compile(f, donate_argnums=argnums, **BACKENDS[backend])


Pair = collections.namedtuple("Pair", "p t")


class Box:
    def __init__(self, p, t):
        self.p, self.t = p, t


def whole_copy(w):
    return torch.empty_like(w).copy_(w)


# Other tensor objects of one buffer.
OTHERS = {
    "same object": lambda w: w,
    "detach": torch.Tensor.detach,
    "data": lambda w: w.data,
    "parameter": lambda w: torch.nn.Parameter(w.detach(), requires_grad=False),
    "whole copy": whole_copy,
    "detach of data": lambda w: w.data.detach(),
}
# Ways to return it.
FORMS = {
    "unchanged": lambda x: x,
    "detach": torch.Tensor.detach,
    "data": lambda x: x.data,
    "detach of data": lambda x: x.data.detach(),
    "to its own dtype": lambda x: x.to(x.dtype),
    "contiguous": torch.Tensor.contiguous,
    "real": lambda x: x.real,
    "clone": torch.Tensor.clone,
    "whole copy": whole_copy,
}


@pytest.mark.parametrize("form", FORMS)
@BACKEND
def test_a_returned_argument_that_shares_its_buffer_is_kept(make, backend, form):
    """One place is returned in this form, while the function computes with the other one. Each is, in turn."""
    returned = FORMS[form]
    with torch.no_grad():
        for place in (0, 1):
            g = give_away(
                lambda a, b, c, place=place: (returned((a, b)[place]), (b, a)[place] + 1, c * 2), backend, (0, 1, 2)
            )
            for other, second_of in OTHERS.items():
                w, free = make(4), make(3)
                second = second_of(w)
                torch_xla.sync(wait=True)
                assert _C.identity(second)[1] == _C.identity(w)[1]
                result, new, _ = g(w, second, free)
                assert is_donated(free), other
                assert (result.tolist(), new.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4]), other


inner = compile(lambda a, b, x: (a, b + 1, x * 2), donate_argnums=(0, 1, 2))


def arguments(a, b, x):
    return a, b, x


def dictionary(a, b, x):
    return ({"a": a, "b": b, "c": [x]},)


#: Functions of two tensors of one buffer, and of another tensor: they return the first, and the buffer stays.
RETURNED = {
    "in a namedtuple": (arguments, lambda a, b, x: (Pair(a, b + 1), x * 2)),
    "in a pytree": (arguments, lambda a, b, x: (Couple(a, b + 1), x * 2)),
    "in builtins": (arguments, lambda a, b, x: ({"p": [a], "t": ({"t": b + 1},)}, x * 2)),
    "by a function inside": (arguments, lambda a, b, x: (inner if a.is_xla else inner.__wrapped__)(a, b, x)),
    "in a dictionary": (dictionary, lambda s: {"a": s["a"], "b": s["b"] * 2, "rest": [s["a"], s["c"][0] + 1]}),
    "among unused entries": (dictionary, lambda s: {**s, "c": s["c"][0] + 1}),
}
#: Results that are no pytrees, which `pure` refuses.
IN_OBJECTS = {
    "an object": lambda a, b, x: (Box(a, b + 1), x * 2),
    "a partial function": lambda a, b, x: (functools.partial(print, a), b + 1, x * 2),
    "a closure": lambda a, b, x: (lambda: a, b + 1, x * 2),
    "a set": lambda a, b, x: ({a}, b + 1, x * 2),
    "a deque": lambda a, b, x: (collections.deque([{"k": (a,)}]), b + 1, x * 2),
    "an iterator": lambda a, b, x: (iter([a]), b + 1, x * 2),
    "a key": lambda a, b, x: ({a: 1}, b + 1, x * 2),
}


def assert_right_and_only_the_last_donated(f, structure, backend, make):
    def tensors_of(a, x):
        result = function(*structure(a, a.detach(), x))
        return sorted(tensor.tolist() for tensor in _trees.tensors_in(result))

    function = f
    expected = tensors_of(torch.arange(3.0), torch.arange(4.0))
    function = give_away(f, backend, (0, 1, 2) if structure is arguments else 0)
    for _ in range(2):
        w, free = make(3), make(4)
        assert tensors_of(w, free) == expected
        assert is_donated(free) and not is_donated(w)


@pytest.mark.parametrize("name", RETURNED)
@BACKEND
def test_a_shared_buffer_is_kept_in_any_returned_structure(make, backend, name):
    structure, f = RETURNED[name]
    assert_right_and_only_the_last_donated(f, structure, backend, make)


@pytest.mark.parametrize("name", IN_OBJECTS)
def test_an_argument_in_any_object_of_the_result_is_kept(make, name):
    for backend in ("lazy", "openxla") if name == "an object" else ("lazy",):
        assert_right_and_only_the_last_donated(IN_OBJECTS[name], arguments, backend, make)


@BACKEND
def test_an_argument_that_is_returned_as_a_whole_is_kept(make, backend):
    """The result is the dictionary that the caller gave: nothing in it may go, whatever has computed with it."""
    g = give_away(lambda s, x: (s, s["b"] + 1, x * 2), backend, (0, 1))
    for _ in range(2):
        w, free = make(3), make(4)
        state = {"a": w, "b": w.detach(), "c": [make(3)]}
        same, new, _ = g(state, free)
        assert is_donated(free) and not is_donated(w)
        assert same["a"].tolist() == same["b"].tolist() == same["c"][0].tolist() == [0, 1, 2]
        assert new.tolist() == [1, 2, 3]


@BACKEND
def test_a_module_or_its_parameter_is_returned(make, backend):
    for returned in (lambda m: m, lambda m: m.weight):
        module = torch.nn.Linear(3, 3).to("xla").requires_grad_(False)
        weight = module.weight.tolist()
        g = give_away(lambda m, x, f=returned: (f(m), m.weight * 2, x + m.bias), backend, (0, 1))
        for _ in range(2):
            x = make(3)
            same, twice, _ = g(module, x)
            assert is_donated(x) and not is_donated(module.weight)
            assert (same.weight if same is module else same).tolist() == weight
            assert twice.tolist() == (torch.tensor(weight) * 2).tolist()


@BACKEND
def test_calls_whose_ties_differ_are_right(make, backend):
    """One function, called with other ties each time: each call is right, and gives away what it may."""
    g = give_away(lambda s: {"a": s["a"], "b": s["b"] + 1, "c": s["c"] * 2}, backend)
    for _ in range(2):
        for ties in ("abc", "aac", "aba", "abb", "aaa", "abc"):
            made = {letter: make(3) for letter in sorted(set(ties))}
            state = {key: made[letter].detach() for key, letter in zip("abc", ties)}
            result = g(state)
            assert [result[key].tolist() for key in "abc"] == [[0, 1, 2], [1, 2, 3], [0, 2, 4]], ties
            for key, letter in zip("abc", ties):
                assert is_donated(state[key]) == (letter != ties[0]), (ties, key)


@BACKEND
def test_a_state_with_aliases_compiles_once_for_each_pattern(make, backend):
    """A result in two places is one buffer in two places of the next call; each pattern has one graph."""

    def step(s):
        new = s["a"] + 1
        return {"a": new, "alias": new.detach(), "frozen": s["frozen"], "copy": s["alias"], "free": s["free"] * 2}

    g = give_away(step, backend)
    w = make(3)
    state = {"a": w, "alias": make(3), "frozen": w.detach(), "copy": make(3), "free": make(4)}
    for round in range(1, 7):
        if round == 5:
            compiled = compiles()
        state, old = g(state), state
        torch_xla.sync()
        assert is_donated(old["free"]) and not is_donated(old["frozen"])
        assert state["frozen"].tolist() == [0, 1, 2]
        assert state["a"].tolist() == state["alias"].tolist() == [round, round + 1, round + 2]
        if round > 1:
            assert state["copy"].tolist() == [round - 1, round, round + 1]
    assert compiles() == compiled


@BACKEND
def test_a_returned_tensor_of_the_closure_is_kept(make, backend):
    w = make(3)
    g = give_away(lambda a: (w, a + 1), backend)
    for _ in range(2):
        same, new = g(w.detach())
        assert same is w and not is_donated(w)
        assert (w.tolist(), new.tolist()) == ([0, 1, 2], [1, 2, 3])
    x = make(3)
    assert g(x)[1].tolist() == [1, 2, 3]
    assert is_donated(x)


def test_pure_refuses_an_object_that_hides_a_tensor(make):
    for hide, name in [
        (lambda t: Box(t, t + 1), "Box"),
        (lambda t: {t * 2}, "set"),
        (lambda t: {"a": t * 2}.values(), "dict_values"),
    ]:
        w = make(3)
        with pytest.raises(DonationError, match=f"which a result of type {name} keeps.*register the type"):
            give_away(hide, "pure")(w)
        assert w.tolist() == [0, 1, 2] and not is_donated(w)


def test_openxla_donates_what_a_graph_reads_and_keeps_the_rest(make):
    """A place of the buffer that no part of the function reads or returns does not keep it."""
    g = give_away(lambda a, b: b + 1, "openxla", (0, 1))
    for _ in range(2):
        w = make(3)
        assert g(w, w.detach()).tolist() == [1, 2, 3]
        assert is_donated(w)


def test_openxla_returns_an_alias_that_torch_xla_would_lose(make):
    """torch_xla's bridge knows an input among the results only by its object, and runs out of results."""
    g = give_away(lambda a, b: (a.detach(), b + 1, b.detach(), a * 2), "openxla", (0, 1))
    for _ in range(2):
        a, b = make(3), make(3) + 5
        torch_xla.sync()
        assert [x.tolist() for x in g(a, b)] == [[0, 1, 2], [6, 7, 8], [5, 6, 7], [0, 2, 4]]
    a = torch.nn.Parameter(make(3))
    detached, *_ = g(a, make(3))
    assert not detached.requires_grad


def test_openxla_backward_of_a_tied_argument(make):
    g = give_away(lambda a, b, c: (a, (b * b).sum(), c + 1), "openxla", (0, 1, 2))
    for _ in range(2):
        w, free = make(3), make(4)
        same, loss, _ = g(w, w.detach().requires_grad_(), free)
        loss.backward()
        assert same.tolist() == [0, 1, 2]
        assert is_donated(free) and not is_donated(w)


VIEWED: dict[str, Any] = {
    "the view and an alias of it": lambda b, v: (v, v.view_as(v)),
    "an output beside them": lambda b, v: (v, v.view_as(v), b + 1),
    "the base": lambda b, v: (v.t(), b),
    "views of both": lambda b, v: (v.t() + b, b[1:], v[0]),
    "the view is read only": lambda b, v: (b + 1, v * 2),
}


#: Each backend meets each body and each choice of donors, and each body each choice.
PAIRWISE = [
    (backend, body, ((0, 1), (0,), (1,))[(i + j) % 3])
    for i, backend in enumerate(BACKENDS)
    for j, body in enumerate(VIEWED)
]


@pytest.mark.parametrize(("backend", "body", "donated"), PAIRWISE)
def test_an_argument_that_is_a_view_of_a_donated_one(make, backend, body, donated):
    """Donating the base must not make the view pending again, also where a step has given it a buffer."""
    g = give_away(lambda b, v, c: (*VIEWED[body](b, v), c + 1), backend, (*donated, 2))
    b = torch.arange(9.0).view(3, 3)
    expected = [x.tolist() for x in VIEWED[body](b, b.t())]
    for synced in (False, True, False):
        b, free = make(3, 3), make(5)
        v = b.t()
        if synced:
            torch_xla.sync()
        *results, _ = g(b, v, free)
        assert [x.tolist() for x in results] == expected
        assert is_donated(free)
        if donated == (0,):
            assert v.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


VIEWS = {"transposed": torch.t, "part": lambda a: a[1:], "flat": lambda a: a.view(-1)}


@pytest.mark.parametrize("view", VIEWS)
def test_openxla_refuses_to_update_a_view_of_an_argument(make, view):
    """torch.compile gives wrong values here, also without donation."""

    def update(a, v):
        v[0].add_(1)
        return a * 1, v * 1

    for donated in ((), (0,), (0, 1)):
        g = give_away(update, "openxla", donated)
        for _ in range(2):
            a = make(2, 3)
            with pytest.raises(DonationError, match="view of another argument"):
                g(a, VIEWS[view](a))
            assert a.tolist() == [[0, 1, 2], [3, 4, 5]]
    lazy = give_away(update, "lazy", ())
    expected = update(*(lambda a: (a, VIEWS[view](a)))(torch.arange(6.0).view(2, 3)))
    assert [x.tolist() for x in lazy(a, VIEWS[view](a))] == [x.tolist() for x in expected]


@BACKEND
def test_lower_knows_what_shares_a_buffer(make, backend):
    g = give_away(lambda s: {"p": s["p"], "t": s["t"] * 2, "q": s["q"] + 1}, backend)
    w = make(3)
    for other in OTHERS.values():
        second = other(w)
        torch_xla.sync()
        lowered = g.lower({"p": w, "t": second, "q": make(3)})
        assert len(hlo.parse(lowered.as_text()).donors) == 1
        executable = lowered.compile()
        assert len(hlo.parse(executable.as_text()).aliases) == 1
        if backend == "pure":
            result = executable({"p": w, "t": second, "q": make(3)})
            assert result["p"].tolist() == w.tolist() == [0, 1, 2]
    untied = g.lower({"p": w, "t": make(3), "q": make(3)})
    assert len(hlo.parse(untied.as_text()).donors) == 2


def test_a_returned_view_keeps_its_value_and_refuses_writes(make):
    """A write through it would have to reach its base, which the call has consumed."""
    f = compile(lambda a: a.view_as(a), donate_argnums=0)
    t = f(make(3))
    row = t[1:]
    with pytest.raises(DonatedBufferError):
        t[0] = 8
    assert t.tolist() == [0, 1, 2]
    assert row.tolist() == [1, 2]
    with pytest.raises(DonatedBufferError):
        row.fill_(8)
    assert t.tolist() == [0, 1, 2]
    part = f(make(4))[1]  # of a view that nothing else holds
    assert not is_donated(part) and part.item() == 1
    u = compile(lambda a: a.view_as(a).clone(), donate_argnums=0)(make(3))
    u[0] = 8
    assert u.tolist() == [8, 1, 2]


def test_a_refused_write_in_a_list_keeps_the_others_whole(make):
    """A `_foreach` operation on a view of a donated tensor and on others: each other tensor agrees with its views."""
    for place in (0, 1, 2):
        t, others = make(4), [make(2), make(2)]
        view = t[1:3]
        kept = consume(t, lambda t, view=view: [view + 0, t + 1])
        rows = [other[:1] for other in others]
        tensors = [*others[:place], view, *others[place:]]
        with pytest.raises(DonatedBufferError):
            torch._foreach_add_(tensors, [10.0] * 3)
        for other, row in zip(others, rows):
            assert other[:1].tolist() == row.tolist()
            other[1] = 5
            assert other.tolist() == [row.item(), 5]
        assert [one.tolist() for one in kept] == [[1, 2], [1, 2, 3, 4]]
