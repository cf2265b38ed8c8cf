"""advise(f, *args): what a function could still donate."""

from __future__ import annotations

import sys
import threading
import types
import weakref

import pytest
import torch
import torch_xla
from helpers import make
from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call

from torch_xla_donate import _C, Advice, advise, auto_donate, compile, donation_report
from torch_xla_donate._modes import debug
from torch_xla_donate._report.walk import OBJECTS, Name, Walk, name_tensors

SIZE = 32 * 32 * 4


def test_a_functional_update_of_its_arguments():
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
    # Its step ends inside, so advise cannot tell its arguments from other inputs.
    assert "pass the function itself" in str(advise(compile(update), params, gradient, 0.5))
    compile(update, donate_argnums=(0,))(params, gradient, 0.5)
    assert donation_report(steps=1).donated_bytes == hint.bytes
    del small


def test_arguments_by_keyword_in_part_and_of_odd_callables():
    def update(*, old):
        return old * 2

    (hint,) = advise(update, old=make(32, 32))
    assert "donate_argnames=('old',)" in hint.edit

    def partly(state):
        return state[0] * 2 + state[1].sum()

    # One of which a part has no result is left out.
    assert not advise(partly, [make(32, 32), make(64, 64)])

    class Odd:
        def __call__(self, first, *others):
            return others[1] * 2

        def __getattr__(self, name):
            raise RuntimeError(name)

    def last(first, *others):
        return others[1] * 2

    # Not each has a name, and the callable may have no source.
    (hint,) = advise(last, 1, 2, make(32, 32))
    assert (hint.holder, hint.bytes) == ("argument 'others[1]'", SIZE)
    assert "donate_argnums=(2,)" in hint.edit
    assert not advise(Odd(), 1, 2, make(32, 32))
    assert donation_report().errors["advise: RuntimeError: __wrapped__"] == 2


def test_the_state_of_a_closure():
    x = make(32, 32)

    def step():
        nonlocal x
        x = x * 0.5

    (hint,) = advise(step)
    assert (hint.kind, hint.name, hint.bytes) == ("reassignment", "x", SIZE)
    assert hint.where == f"{__file__}:{step.__code__.co_firstlineno + 2}"
    assert "set_auto_donate(True)" in hint.edit and "donate_buffer" not in hint.edit
    with auto_donate():
        assert not advise(step)
        assert donation_report(steps=1).donated_bytes == hint.bytes
    assert x[0, 1].item() == 0.5**4


@pytest.mark.parametrize("inner_sync", [False, True])
def test_an_optimizer_in_place_needs_nothing(inner_sync):
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


def is_watched(make):
    x = make(4)
    _ = x * 2
    torch_xla.sync()
    return _C.take_watched_step() is not None or debug._listener.value is not None


def test_an_error_and_an_interrupt_at_the_beginning_leave_nothing_behind():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        advise(fail)
    assert not is_watched(make)

    def interrupt(frame, event, function):
        if event == "c_return" and function is _C.watch_inputs:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            advise(make, 4)
    finally:
        sys.setprofile(None)
    assert not is_watched(make)


def test_a_step_that_fails_is_not_taken_for_a_later_one():
    seen = []
    broken = stablehlo_custom_call((make(8),), "no_such_target", [[8]], [torch.float32])
    with debug.listening(seen.append):
        with pytest.raises(Exception, match="custom.call|no_such_target"):
            torch_xla.sync()
        del broken
        torch_xla.sync()
        assert not seen
        y = make(4) + 1
        torch_xla.sync()
    assert [len(step.outputs) for step in seen] == [1] and y.tolist() == [1, 2, 3, 4]


def test_advice_inside_advice():
    x, inner = make(32, 32), []

    def step():
        nonlocal x
        x = x * 0.5

    def both():
        inner.extend(advise(step))
        step()

    (outer,) = advise(both)  # it sees the last step, and not the steps before
    assert [hint.kind for hint in (*inner, outer)] == ["reassignment", "reassignment", "free_input"]
    assert not is_watched(make)


def test_steps_of_another_thread_do_not_count():
    x = make(32, 32)

    def work():
        nonlocal x
        x = x * 2
        torch_xla.sync()

    def elsewhere():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert not advise(elsewhere)
    (hint,) = advise(work)
    assert (hint.kind, hint.runs) == ("reassignment", 1)
    assert not is_watched(make)


def test_a_listener_that_raises_does_not_stop_the_program():
    def fail(step):
        raise ValueError("no listener")

    x = make(32, 32)
    with debug.listening(fail):
        for _ in range(3):
            x = x * 0.5
            torch_xla.sync()
    assert x[0, 1].item() == 0.5**3
    assert donation_report().errors["advise: ValueError: no listener"] == 3


def test_the_number_of_named_steps_of_a_call_is_bounded():
    x = make(32, 32)

    def loop():
        nonlocal x
        for _ in range(20):
            x = x * 0.5
            torch_xla.sync()

    (hint,) = advise(loop)
    assert (hint.kind, hint.runs) == ("reassignment", 15)  # the first of 16 has unknown names before it


def named(variable):
    """The names of tensors that begin with a variable of the caller."""
    return {str(n) for found in name_tensors().values() for n in found.names if n.variable == variable}


def test_large_containers_leave_the_others_their_names():
    """The walk visits no more objects than its budget has."""
    x = make(4)
    numbers, texts = [0] * 10_000_000, dict.fromkeys(range(1_000_000), "text")
    many = [[i] for i in range(2 * OBJECTS)]
    state = [numbers, texts, many, {"model": [{"w": x}]}]
    walk = Walk()
    walk.add_variables({"state": state, "last": [x]}, Name("", "", None, "train.py", 0))
    walk.run()
    (found,) = walk.found.values()
    assert [str(name) for name in found.names] == ["last[0]", "state[3]['model'][0]['w']"]
    assert OBJECTS // 2 < walk.visited <= OBJECTS


def test_objects_that_break_rules_cost_only_their_own_names():
    """And none of their code runs."""
    calls = []

    def note(*args, **kwargs):
        calls.append(args)
        raise RuntimeError("code of the program")

    class Key(str):
        __slots__ = ()
        __repr__ = __str__ = __format__ = note
        __eq__ = note
        __hash__ = str.__hash__

    class Meta(type):
        __getattribute__ = __eq__ = __subclasscheck__ = __instancecheck__ = note
        __hash__ = note

    class Proxy:
        __class__ = property(note)
        __getattribute__ = __getattr__ = __len__ = __iter__ = __bool__ = __eq__ = note
        __hash__ = note

    class Space:
        __dict__ = property(note)
        __module__ = property(note)

    class Slots:
        __slots__ = ("empty", "x")
        __getattr__ = note

    class Loud(torch.Tensor):
        device = grad = is_leaf = property(note)

    class Fields(tuple):
        _fields = ("first",)

    class Items(dict):
        items = keys = values = __iter__ = __len__ = __bool__ = note

    def set_class(value, **attributes):
        for name, attribute in attributes.items():
            object.__setattr__(value, name, attribute)
        return value

    x = make(4)
    module, linear = torch.nn.Module(), torch.nn.Linear(1, 1)
    module.__dict__.update(_parameters=7, _buffers=Items(b=x), _modules=None)
    first, second = make(2), make(2)
    first.other, second.other = second, first
    odd = [
        {Key("k"): x, "k" * 1_000_000: x, 10**5000: x, (1,): x},
        set_class(Proxy(), x=x),
        Space(),
        set_class(Slots(), x=x),
        torch.ones(1).as_subclass(Loud),
        Fields((x, x)),
        Items(x=x),
        module,
        weakref.proxy(linear),
        first,
        Meta("Kind", (), {}),
        types.SimpleNamespace(x=x),
        threading.local(),
    ]
    odd.append(type.__call__(odd[10]))
    before = donation_report().errors
    object.__setattr__(odd[-1], "x", x)
    found = named("odd")
    assert calls == []
    assert found == {
        *(f"odd[0][key {i}]" for i in range(4)),
        *(f"odd[{i}].x" for i in (1, 3, 11, 13)),
        *("odd[5].first", "odd[5][1]", "odd[6]['x']", "odd[7].b"),
        *("odd[9]", "odd[9].other", "odd[9].other.other"),
    }
    assert donation_report().errors == before


def test_small_arrays_are_left_out():
    x = make(255)

    def step():
        nonlocal x
        x = x * 0.5

    assert not advise(step)
    x = make(256)
    assert [hint.bytes for hint in advise(step)] == [1024]


def test_a_step_is_a_function():
    with pytest.raises(TypeError, match=r"^f is of type Tensor, which cannot be called\. Pass the function of a step"):
        advise(torch.ones(1))
