"""compile(pure=True): calls like the last one take one pass in C++, all others the general way."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import UNUSABLE_IGNORED, compiles, error_of, pointer

import torch_xla_donate
from torch_xla_donate import (
    _C,
    DonatedBufferError,
    _host,
    cancel_donation,
    donate_buffer,
    donation_disabled,
    donation_report,
    is_donated,
)
from torch_xla_donate._compile import pure

pytestmark = UNUSABLE_IGNORED


@pytest.fixture
def general(monkeypatch):
    """The number of calls that went the general way: a counter in front of its first function."""
    counted = []
    leaves_of_call = pure.leaves_of_call
    monkeypatch.setattr(pure, "leaves_of_call", lambda call: (counted.append(1), leaves_of_call(call))[1])
    return counted


def update(state, gradient, rate, *, name="sgd"):
    return {"w": state["w"] - rate * gradient[0], "n": state["n"], "name": name}


@pytest.fixture
def step(make, general):
    """A compiled update that has run twice, its state, and its gradient."""
    f = torch_xla_donate.compile(update, donate_argnums=0, pure=True)
    state, gradient = {"w": make(4), "n": 3}, [make(4)]
    for _ in range(2):
        state = f(state, gradient, 0.5)
    general.clear()
    return f, state, gradient


def test_a_loop_leaves_the_general_way_after_its_first_call(step, general):
    """Its numbers may change."""
    f, state, gradient = step
    address, before = pointer(state["w"]), compiles()
    for rate, left in ((0.5, -0.5), (0.5, -1.0), (0.25, -1.25)):
        given = state["w"]
        state = f(state, gradient, rate)
        assert is_donated(given) and pointer(state["w"]) == address
        assert state["w"].tolist() == [left * x for x in range(4)]
        assert donation_report().donors[-1].outcome == "donated"
    assert not general and compiles() == before


ones = torch.ones
DEVIATIONS = {
    "another shape": lambda state, _: ({**state, "w": ones(2).to("xla")}, [ones(2).to("xla")], 0.5),
    "another dtype": lambda state, _: ({**state, "w": ones(4).half().to("xla")}, [ones(4).half().to("xla")], 0.5),
    "another int": lambda state, gradient: ({**state, "n": 4}, gradient, 0.5),
    "a bool for an int": lambda state, gradient: ({**state, "n": True}, gradient, 0.5),
    "another text": lambda state, gradient: ({**state, "name": "adam"}, gradient, 0.5),
    "an int for a float": lambda state, gradient: (state, gradient, 1),
    "another order of keys": lambda state, gradient: (dict(reversed(state.items())), gradient, 0.5),
    "one key less": lambda state, gradient: ({"w": state["w"], "n": 3}, gradient, 0.5),
    "a tuple for a list": lambda state, gradient: (state, tuple(gradient), 0.5),
    "one more element": lambda state, gradient: (state, [*gradient, gradient[0] * 2], 0.5),
    "a gradient is wanted": lambda state, gradient: (state, [gradient[0].detach().requires_grad_()], 0.5),
    "pending work": lambda state, gradient: ({**state, "w": state["w"] + 0}, gradient, 0.5),
}


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_call_that_differs_goes_the_general_way(step, general, deviation):
    f, state, gradient = step
    with torch.no_grad():  # a call is like one in the same mode
        state = f(state, gradient, 0.5)
        general.clear()
        deviate = DEVIATIONS[deviation]
        cpu = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, (state, gradient))
        expected, arguments = update(*deviate(*cpu)), deviate(state, gradient)
        result = f(*arguments)
    assert len(general) == 1 and is_donated(arguments[0]["w"])
    assert list(result) == list(expected) and result["n"] is expected["n"]
    assert result["w"].dtype == expected["w"].dtype and result["w"].tolist() == expected["w"].tolist()


def test_tensors_under_each_others_keys_go_the_general_way(make, general):
    f = torch_xla_donate.compile(lambda state: state["a"] * 10 + state["b"], donate_argnums=0, pure=True)
    for _ in range(2):
        f({"a": make(4), "b": make(4)})
    general.clear()
    assert f({"b": make(4), "a": torch.ones(4).to("xla")}).tolist() == [10, 11, 12, 13]
    assert len(general) == 1


@pytest.mark.parametrize("before", [torch.int32, torch.int64], ids=str)
def test_indices_of_32_bits_are_no_other_integers(make, general, before):
    """They have the dtype of one and the element type of the other."""
    f = torch_xla_donate.compile(lambda t: t + 1, donate_argnums=0, pure=True)
    for _ in range(2):
        f(make(4, dtype=before))
    indices = make(4).cummax(0).indices
    torch_xla.sync()
    general.clear()
    out = f(indices)
    assert len(general) == 1 and out.dtype == torch.int64 and out.tolist() == [1, 2, 3, 4]


def test_other_keywords_modes_and_statics_go_the_general_way(step, general):
    f, state, gradient = step
    assert f(state, gradient, 0.5, name="other")["name"] == "other" and len(general) == 1
    g = torch_xla_donate.compile(lambda t, k: t * k, donate_argnums=0, static_argnums=1, pure=True)
    t = torch.ones(3, device="xla")
    torch_xla.sync()
    for k in (2, 2, 3, True):
        t = g(t, k)
    assert t.tolist() == [12.0] * 3


def test_the_mode_of_a_module_without_tensors_is_looked_at(make, general):
    drop = torch.nn.Dropout(1.0).eval()
    f = torch_xla_donate.compile(lambda t: drop(t) + 1, donate_argnums=0, pure=True)
    for _ in range(2):
        assert f(make(4)).tolist() == [1, 2, 3, 4]
    general.clear()
    drop.train()
    assert f(make(4)).tolist() == [1, 1, 1, 1] and len(general) == 1


def test_a_held_argument_is_kept(step):
    f, state, gradient = step
    held = _host.same_buffer(state["w"])
    expected = held.cpu()
    f(state, gradient, 0.5)
    assert not is_donated(held) and torch.equal(held.cpu(), expected)
    assert donation_report().donors[-1].reason_code == "held_by_others"


def test_a_donated_argument_raises_and_marks_nothing(step):
    f, state, gradient = step
    after = f(state, gradient, 0.5)
    assert "donated" in error_of(DonatedBufferError, f, state, gradient, 0.5)
    torch_xla_donate.compile(lambda t: t + 1, donate_argnums=0, pure=True)(gradient[0])
    with pytest.raises(RuntimeError, match="donated"):
        f(after, gradient, 0.5)
    assert not is_donated(after["w"])
    assert f(after, [torch.zeros(4, device="xla")], 0.5)["w"].tolist() == [0.0, -0.5, -1.0, -1.5]


def test_an_argument_given_twice_is_refused(step):
    f, state, _ = step
    assert "gradient" in error_of(ValueError, f, state, [state["w"]], 0.5)
    assert not is_donated(state["w"])


def test_donation_disabled_and_marks_by_hand_hold_in_repeated_calls(step):
    f, state, gradient = step
    with donation_disabled():
        kept = f(state, gradient, 0.5)
    assert not is_donated(state["w"])
    donate_buffer(state["w"])
    result = f(state, gradient, 0.5)
    assert is_donated(state["w"]) and torch.equal(result["w"].cpu(), kept["w"].cpu())
    donate_buffer(result["w"])
    cancel_donation(result["w"])
    f(result, gradient, 0.5)
    assert is_donated(result["w"])


def test_a_failing_repeated_run_keeps_its_arguments(step, monkeypatch):
    f, state, gradient = step
    before = state["w"].tolist()

    def fail(*arguments):
        raise RuntimeError("the run failed")

    monkeypatch.setattr(pure._host, "run_graph", fail)
    with pytest.raises(RuntimeError, match="the run failed") as _kept:  # an error that is kept keeps the call
        f(state, gradient, 0.5)
    assert _C.pending() == []
    monkeypatch.undo()
    assert not is_donated(state["w"]) and state["w"].tolist() == before
    assert is_donated(state["w"]) is False and f(state, gradient, 0.0)["w"].tolist() == before


@pytest.mark.parametrize("options", [{}, {"pure": True}, {"backend": "openxla"}], ids=str)
def test_a_call_first_runs_the_closures_of_the_step_before(make, options):
    """So they still read the values that the call donates."""
    f = torch_xla_donate.compile(lambda t: t + 1, donate_argnums=0, **options)
    state, seen = make(2), []
    for _ in range(2):
        state = f(state)
        xm.add_step_closure(lambda value: seen.append(value.tolist()), args=(state,))
    state = f(state)
    assert seen == [[1, 2], [2, 3]] and state.tolist() == [3, 4]
