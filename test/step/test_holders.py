"""donation_report().held names who holds an input that auto_donate would have taken."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types
import weakref

import pytest
import torch
import torch_xla
from helpers import no_collections

from torch_xla_donate import _C, auto_donate, donation_report
from torch_xla_donate._report import walk
from torch_xla_donate._report.walk import user_frames

HERE = "test_holders.py"


@pytest.fixture(autouse=True)
def _automatic():
    with auto_donate():
        yield


def holders():
    return [held.holder for held in donation_report().held]


def assigns(xs, state):
    w = 1
    y = [w + 1 for w in xs]
    state["w"] = y
    w, z = y
    z[:] = [w]
    z.a = w
    w = [
        w + 1
        for w in xs
    ]  # fmt: skip
    return w, z


def test_the_lines_that_store_a_variable_or_a_part_are_found_in_the_bytecode_of_each_python():
    def lines(name, *kinds):
        found = walk.stores_of(name, assigns.__code__, *kinds)
        return [line - assigns.__code__.co_firstlineno for line in found]

    assert lines("w") == [1, 4, 7]
    assert lines("z") == [4]
    assert lines("z", walk._PARTS) == [5, 6]


def test_a_variable_that_only_a_function_assigns_has_the_line_of_that_function():
    module = compile("def train():\n    global loss\n    loss = 1\ntrain()\n", "program.py", "exec")
    assert walk.assigned_at("loss", module, 4) == 3
    assert walk.assigned_at("train", module, 4) == 1


def test_a_parameter_that_no_function_inside_assigns_has_the_line_of_its_own_function():
    """One writes an item of it, another has a variable of its name."""

    def outer(x):
        def write():
            x[0] = 1

        def other():
            x = 1
            return lambda: x

        return write, other

    assert walk.assigned_at("x", outer.__code__, outer.__code__.co_firstlineno + 4) == outer.__code__.co_firstlineno


def test_a_local_variable_and_the_line_that_sets_it(make):
    line = test_a_local_variable_and_the_line_that_sets_it.__code__.co_firstlineno
    w = make(7)
    old = w
    w = w * 2
    torch_xla.sync()
    assert holders() == [f"variable 'old' at {HERE}:{line + 3}"]
    assert "held by variable 'old' at" in str(donation_report())
    gone = weakref.ref(old)
    del old
    gc.collect()
    assert gone() is None  # the search keeps nothing alive
    w = w * 2
    torch_xla.sync()
    assert holders() == []
    assert w.tolist() == [4.0 * i for i in range(7)]


def variables():
    return _C.frame_variables(sys._getframe(1))


def test_the_variables_of_a_frame():
    free, shared = "free", 1

    def function(a, b=2, *rest, **named):
        nonlocal shared
        known = locals()
        before = dict(known)
        captured = a
        inner = lambda: captured  # noqa: E731
        gone = 1
        del gone
        late = 1
        found = variables()
        assert known == before  # `f_locals` would add the later ones
        assert found == before | {"known": known, "before": before, "captured": a, "inner": inner, "late": 1}
        assert found is not variables()
        return free

    function(1, 2, 3, c=4)

    def generator(n):
        first = n
        yield
        second = n
        yield first, second

    suspended = generator(1)
    for expected in ({"n": 1}, {"n": 1, "first": 1}, {"n": 1, "first": 1, "second": 1}):
        assert _C.frame_variables(suspended.gi_frame) == expected
        next(suspended, None)

    class Body:
        member = 1
        found = variables()

    assert Body.found["member"] == 1

    class Space:
        """A namespace that is not a dictionary. Reading `f_locals` deletes `__class__` from it."""

        def __setitem__(self, key, value):
            pass

        def __getitem__(self, key):
            raise KeyError(key)

        def __delitem__(self, key):
            raise AssertionError

    class Meta(type):
        @classmethod
        def __prepare__(cls, name, bases):
            return Space()

        def __new__(cls, name, bases, namespace):
            return name  # a class would have to get its `__class__`

    found = []

    class _Odd(metaclass=Meta):
        def method(self):
            return __class__

        found.append(variables())

    assert found == [{}]

    with pytest.raises(TypeError, match="expected a frame, got int"):
        _C.frame_variables(1)


def test_the_variables_of_another_thread_are_read():
    at_work, done = threading.Event(), threading.Event()

    def work():
        _hidden = 5
        at_work.set()
        done.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    at_work.wait()
    frames = [frame for frame in user_frames() if frame.f_code is work.__code__]
    assert [_C.frame_variables(frame)["_hidden"] for frame in frames] == [5]
    done.set()
    thread.join()


def test_a_search_leaves_the_frames_of_pytest_out():
    assert __name__ in {frame.f_globals["__name__"] for frame in user_frames()}
    assert not {"item", "items", "session"} & {name for frame in user_frames() for name in frame.f_locals}


def test_attributes_items_keys_parameters_and_closures(make):
    def closed(w):
        return lambda: w

    state, kept, function = types.SimpleNamespace(w=make(8)), {"old": [make(9)]}, closed(make(10))
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(make(11))})
    _results = [state.w * 2, kept["old"][0] * 2, function() * 2, model.weight.detach() * 2]
    torch_xla.sync()
    found = [holder.partition(f" at {HERE}:") for holder in sorted(holders())]
    assert [name for name, _, _ in found] == ["function's w", "kept['old'][0]", "model.weight", "state.w"]
    assert all(line.isdigit() for _, _, line in found)


def test_a_variable_of_a_suspended_generator(make):
    def rollout(x):
        kept = x
        while True:
            x = x * 2
            yield kept

    async def wait(x):
        batches = [x]
        await asyncio.sleep(0)
        return batches

    code = rollout.__code__
    steps = rollout(make(7))
    next(steps)
    torch_xla.sync()
    assert holders() == [f"variable 'kept' at {HERE}:{code.co_firstlineno + 1}"]
    steps.close()
    x = make(8)
    waiting = wait(x)
    waiting.send(None)
    x = x * 2
    torch_xla.sync()
    found = holders()
    waiting.close()
    # Its argument holds it, too.
    assert found[0].endswith(
        (f"variable 'x' at {HERE}:{wait.__code__.co_firstlineno}", f"{HERE}:{wait.__code__.co_firstlineno + 1}")
    )


@pytest.mark.parametrize("custom", [False, True])
def test_the_graph_of_a_loss(make, custom):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * ctx.saved_tensors[0] * gradient

    p = make(8)
    leaf = p.detach().requires_grad_()
    loss = (Square.apply(leaf) if custom else leaf * leaf).sum()
    (gradient,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    p = p - 0.1 * gradient
    del leaf, gradient
    torch_xla.sync()
    found = holders()
    assert found
    assert all(holder.startswith(f"grad_fn of variable 'loss' at {HERE}:") for holder in found)
    assert loss.item() == sum(i * i for i in range(8))


def test_the_report_calls_no_unpack_hook(make):
    calls = []

    def unpack(tensor):
        calls.append(tensor.shape)
        return tensor

    p, w = make(8), make(8).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        loss = (w * p).sum()
    torch_xla.sync()
    p = p - 0.1
    torch_xla.sync()
    assert holders() == ["unknown holder"]
    assert not calls
    loss.backward()
    assert calls


def test_a_holder_without_a_name_is_unknown(make):
    class Node:
        pass

    cycle = Node()
    cycle.self, cycle.w = cycle, make(8)
    with no_collections():
        _new = cycle.w * 2
        del cycle
        torch_xla.sync()
        assert holders() == ["unknown holder"]
    gc.collect()
