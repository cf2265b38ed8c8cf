"""KeyboardInterrupt at every instruction of compiled calls that enters or leaves a context leaves nothing behind."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch_xla
from children import in_process
from helpers import consume, each_backend, make
from interrupts import interrupt_everywhere

from torch_xla_donate import _C, compile, is_donated

pytestmark = pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")


@pytest.mark.parametrize("fails", [False, True])
@in_process()
def test_every_instruction_of_a_pure_trace(fails):
    """The trace enters its modes, hooks, switches and flags, and leaves them; the next call is right."""
    module = torch.nn.Linear(3, 3).to("xla").requires_grad_(False)
    w, x = make(3), make(3)
    marks = len(_C.pending())

    def f(s):
        if fails:
            raise ValueError
        return {"w": s["w"] + module(s["x"]) * 0, "x": s["x"]}

    def use():
        g = compile(f, pure=True, donate_argnums=0)
        with contextlib.suppress(ValueError):
            g({"w": w, "x": x})

    def check(where):
        nonlocal w
        assert x.tolist() == [0, 1, 2], where
        assert len(_C.pending()) == marks, where
        if is_donated(w):
            w = make(3)
        assert w.tolist() == [0, 1, 2], where

    assert interrupt_everywhere(use, check) > 200
    g = compile(lambda s: s + 1, pure=True, donate_argnums=0)
    y = make(3)
    assert g(y).tolist() == [1, 2, 3] and is_donated(y)


@each_backend
@in_process()
def test_every_instruction_of_a_call(options):
    def f(s):
        return {"w": s["w"] + 1, "x": s["x"]}

    g, keeping = compile(f, donate_argnums=0, **options), compile(lambda s: f(s), **options)
    x = make(3)
    for function in (g, g, keeping):
        function({"w": make(3), "x": x})
    made = [make(3)]

    def use():
        result = g({"w": made[0], "x": x})
        assert result["w"].tolist() == [1, 2, 3]

    def check(where):
        if not is_donated(made[0]):  # a run with the parameters of the one that was interrupted
            assert keeping({"w": made[0], "x": x})["w"].tolist() == [1, 2, 3], where
        torch_xla.sync()
        assert x.tolist() == [0, 1, 2], where
        assert not _C.pending(), where
        if is_donated(made[0]):
            made[0] = make(3)
        assert made[0].tolist() == [0, 1, 2], where

    assert interrupt_everywhere(use, check) > 50
    use()


@in_process()
def test_every_instruction_of_lower():
    g = compile(lambda a: a + 1, donate_argnums=0)
    a = make(3)

    def check(where):
        assert a.tolist() == [0, 1, 2], where

    assert interrupt_everywhere(lambda: g.lower(a).compile(), check) > 100
    assert consume(a, wait=True).tolist() == [1, 2, 3]
