"""advise names the holders of an old value that it finds."""

from __future__ import annotations

import collections
import types
import weakref

import pytest
import torch
import torch_xla
from helpers import make
from watching import repeated, watching

from torch_xla_donate import _C, advise, auto_donate, donation_report
from torch_xla_donate._report import holders
from torch_xla_donate._report.walk import Name, Named

HERE = "test_advise_holders.py"
SIZE = 32 * 32 * 4


def test_an_attribute_of_an_object_that_is_held():
    state = types.SimpleNamespace(new=make(32, 32), old=None)

    def step():
        state.old, state.new = state.new, state.new * 0.5

    (hint,) = advise(step)
    assert (hint.kind, hint.name, hint.edit) == ("held_input", "state.old", "")
    line = test_an_attribute_of_an_object_that_is_held.__code__.co_firstlineno + 1
    assert hint.holder == f"state.old at {HERE}:{line}"  # also in a closure, but one reference


@pytest.mark.parametrize("kept", [("list", "last"), ("list",), ("last",), ()])
def test_each_holder_of_an_old_value_must_let_go(kept):
    """Of holders that are found, the bytes of a hint are saved if all let go, and not before."""
    x, keep, last = make(32, 32), [None], None
    with auto_donate(), watching() as recorder:
        for _ in range(3):
            keep[0] = x if "list" in kept else None
            last = x if "last" in kept else None
            x = x * 0.5
            torch_xla.sync()
        assert donation_report(steps=1).donated_bytes == (0 if kept else SIZE)
    line = test_each_holder_of_an_old_value_must_let_go.__code__.co_firstlineno
    texts = {"list": f"keep[0] at {HERE}:{line + 3}", "last": f"variable 'last' at {HERE}:{line + 7}"}
    more = f" and 1 more: {texts['list']}"
    expected = {2: [texts["last"] + more], 1: [texts[name] for name in kept], 0: []}[len(kept)]
    assert [hint.holder for hint in repeated(recorder)] == expected
    assert all((hint.kind, hint.bytes) == ("held_input", SIZE) for hint in repeated(recorder))
    del last


def test_a_view_of_an_old_value_holds_it():
    kept, x = [], make(32, 32)
    with auto_donate():
        for view in (lambda t: t[0], lambda t: t.view(-1), torch.t):
            kept[:] = [view(x)]
            x = x * 0.5
            torch_xla.sync(wait=True)
            (held,) = donation_report(steps=1).held
            assert held.holder.startswith(f"kept[0] at {HERE}:")


def test_a_holder_that_is_not_searched_is_unknown():
    x, before = make(32, 32), collections.deque(maxlen=1)
    with watching() as recorder:
        for _ in range(3):
            before.append(x)
            x = x * 0.5
            torch_xla.sync()
    (hint,) = repeated(recorder)
    assert (hint.kind, hint.holder, hint.edit) == ("held_input", "unknown holder", "")


def test_many_graphs_are_searched_in_part(monkeypatch):
    w = make(4, 4).requires_grad_()
    states = [make(4, 4)]
    for _ in range(40):
        states.append(states[-1] @ w)
    torch_xla.sync()
    name = Name("x", "", None, "train.py", 0)
    few, many = ([Named(weakref.ref(state), [name]) for state in states[: count + 1]] for count in (5, 40))
    for tensors, found in ((few, 5), (many, holders._SEARCHED)):
        assert [*holders.graphs_saving({_C.holds(w)}, tensors)] == [(name, {_C.holds(w)})] * found
    monkeypatch.setattr(holders, "_NODES", 3)
    assert len([*holders.graphs_saving({_C.holds(w)}, many)]) == 2


def test_values_of_one_list_are_one_hint():
    """Also those that a loop's variable or a graph holds, too."""
    params = {name: make(32, 32) for name in "abc"}
    torch_xla.sync()
    with watching() as recorder:
        for _ in range(3):
            leaves = list(params.values())
            for leaf in leaves:
                leaf.requires_grad_()
            loss = sum((leaf * leaf).sum() for leaf in leaves)
            gradients = torch.autograd.grad(loss, leaves)
            params = {name: (params[name] - g).detach() for name, g in zip("abc", gradients)}
            del gradients
            torch_xla.sync()
    line = test_values_of_one_list_are_one_hint.__code__.co_firstlineno
    (hint,) = repeated(recorder)
    assert (hint.kind, hint.name, hint.count, hint.bytes) == ("held_input", "leaves", 3, 3 * SIZE)
    assert hint.holder == (
        f"variable 'leaves' at {HERE}:{line + 6} and 2 more: variable 'leaf' at {HERE}:{line + 7}, "
        f"grad_fn of variable 'loss' at {HERE}:{line + 9}"
    )


def test_all_graphs_that_keep_a_value_are_named():
    x = make(32, 32)
    with watching() as recorder:
        for _ in range(3):
            x.requires_grad_()
            y = x * x
            loss = y.sum()
            (gradient,) = torch.autograd.grad(loss, [x])
            x = (x - gradient).detach()
            del gradient
            torch_xla.sync()
    (hint,) = repeated(recorder)
    assert (hint.kind, hint.bytes) == ("kept_graph", SIZE)
    assert hint.edit.startswith("loss = loss.detach(), y = y.detach() before the step ends")
    assert hint.holder.count("grad_fn of variable") == 2
