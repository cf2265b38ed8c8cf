"""advise(f, *args): what a function could still donate."""

from __future__ import annotations

import gc
import types

import pytest
import torch
import torch_xla

from torch_xla_donate import Advice, advise, auto_donate, compile, donation_report
from torch_xla_donate._tools.recorder import Recorder

SIZE = 32 * 32 * 4


def test_a_functional_update_of_its_arguments(make):
    """`donate_argnums` of the hint donates its bytes; the arguments keep their values while advising."""

    def update(params, gradient, rate):
        return {name: p - rate * gradient for name, p in params.items()}

    params = {name: make(32, 32) for name in "ab"}
    gradient, small = make(32, 32), make(3)
    (hint,) = advise(update, params, gradient, 0.5)
    assert (hint.kind, hint.bytes, hint.count) == ("functional_update", 2 * SIZE, 2)
    assert hint.holder == "argument 'params'"
    assert "donate_argnums=(0,)" in hint.edit
    assert hint.where == f"{__file__}:{update.__code__.co_firstlineno}"
    assert torch.equal(params["a"].cpu(), torch.arange(1024.0).reshape(32, 32))
    compile(update, donate_argnums=(0,))(params, gradient, 0.5)
    assert donation_report(steps=1).donated_bytes == hint.bytes
    del small


def test_an_argument_by_keyword(make):
    def update(*, old):
        return old * 2

    (hint,) = advise(update, old=make(32, 32))
    assert "donate_argnames=('old',)" in hint.edit


def test_an_argument_of_which_a_part_has_no_result_is_left_out(make):
    def update(state):
        return state[0] * 2 + state[1].sum()

    assert not advise(update, [make(32, 32), make(64, 64)])


def test_the_state_of_a_closure(make):
    x = make(32, 32)

    def step():
        nonlocal x
        x = x * 0.5

    (hint,) = advise(step)
    assert (hint.kind, hint.name, hint.bytes) == ("reassignment", "x", SIZE)
    assert hint.where == f"{__file__}:{step.__code__.co_firstlineno + 2}"
    assert "auto_donate()" in hint.edit and "donate_buffer" not in hint.edit
    with auto_donate():
        assert not advise(step)
        assert donation_report(steps=1).donated_bytes == hint.bytes
    assert x[0, 1].item() == 0.5**4


@pytest.mark.parametrize("inner_sync", [False, True])
def test_an_optimizer_in_place_needs_nothing(make, inner_sync):
    model = torch.nn.Linear(32, 32).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    x = make(8, 32) / 256

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if inner_sync:
            torch_xla.sync()

    assert advise(step) == Advice()


def test_a_model_and_its_input_are_used_again(make):
    model = torch.nn.Linear(32, 8).to("xla")
    x = make(16, 32)
    assert not advise(lambda: model(x).sum())


def test_nothing_stays_behind(make):
    from torch_xla_donate import _C
    from torch_xla_donate._modes.debug import step_listeners

    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        advise(fail)
    assert not step_listeners
    x = make(4)
    _ = x * 2
    torch_xla.sync()
    assert _C.take_watched_step() is None


def test_a_holder_that_python_cannot_name(make):
    class Node:
        pass

    x = make(32, 32)

    def step():
        nonlocal x
        cycle = Node()
        cycle.self, cycle.x = cycle, x
        x = x * 0.5

    gc.disable()  # or else the cycle could be freed before the step
    try:
        (hint,) = advise(step)
    finally:
        gc.enable()
    assert (hint.kind, hint.holder, hint.edit, hint.changes) == ("held_input", "unknown holder", "", ())


def test_names_are_found_without_running_code_of_the_program(make):
    class Odd(dict):
        def items(self):
            raise AssertionError

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args, **kwargs):
            raise AssertionError

    odd, loud = Odd(x=make(32, 32)), torch.ones(2).as_subclass(Loud)
    odd["loud"] = loud

    def step():
        odd["x"] = odd["x"] * 0.5

    (hint,) = advise(step)
    assert (hint.kind, hint.name) == ("functional_update", "odd['x']")
    assert hint.where == f"{__file__}:{step.__code__.co_firstlineno + 1}"


def test_an_attribute_of_an_object_that_is_held(make):
    state = types.SimpleNamespace(new=make(32, 32), old=None)

    def step():
        state.old, state.new = state.new, state.new * 0.5

    (hint,) = advise(step)
    assert (hint.kind, hint.name, hint.edit) == ("held_input", "state.old", "")
    assert hint.holder.startswith("attribute 'old' of variable 'state' at test_advise.py:")


def test_an_error_while_watching_does_not_reach_the_program(make):
    """The report shows it."""

    class Odd(tuple):  # a named tuple with too few names
        _fields = ("x",)

    odd = Odd((make(32, 32), 0))
    with Recorder() as recorder:
        y = odd[0] * 2
        torch_xla.sync()
    assert not recorder.advice()
    assert y.sum().item() == 1023 * 1024
    assert any("advise: IndexError" in error for error in donation_report().errors)


def test_small_arrays_are_left_out(make):
    x = make(16)

    def step():
        nonlocal x
        x = x * 0.5

    assert not advise(step)
    with Recorder(min_bytes=0) as recorder:
        for _ in range(4):
            x = x * 0.5
            torch_xla.sync()
    assert [hint.bytes for hint in recorder.advice()] == [64]


def test_a_step_is_a_function():
    with pytest.raises(TypeError, match=r"^f is of type Tensor, which cannot be called\. Pass the function of a step"):
        advise(torch.ones(1))
