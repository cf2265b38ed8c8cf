"""Autograd's own threads keep gradients into the step at random; compiled functions run autograd on the calling one."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from helpers import pointer, run_script

from torch_xla_donate import compile, is_donated


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


@pytest.mark.parametrize("options", [{}, {"pure": True}, {"backend": "openxla"}], ids=str)
def test_compiled_functions_run_autograd_on_their_thread(make, options):
    seen = []
    parameters, x = model(make)
    inner = torch.compiler.disable(gradients) if "backend" in options else gradients

    @compile(**options)
    def f(parameters, x):
        return inner(parameters, x, seen)

    f(parameters, x)
    assert set(seen) == {threading.get_ident()}
    assert torch.autograd.is_multithreading_enabled()


def test_lower_runs_autograd_on_its_thread(make):
    seen = []
    compile(lambda parameters, x: gradients(parameters, x, seen)).lower(*model(make))
    assert set(seen) == {threading.get_ident()}


def test_the_setting_of_the_program_comes_back_after_an_error(make):
    def fail(x):
        raise ValueError("no")

    for before in (True, False):
        with torch.autograd.set_multithreading_enabled(before):
            with pytest.raises(ValueError, match="no"):
                compile(fail)(make(2))
            assert torch.autograd.is_multithreading_enabled() is before


@pytest.mark.parametrize("options", [{}, {"pure": True}], ids=str)
def test_thirty_steps_move_nothing_and_compile_once(make, options):
    parameters, x = model(make)
    torch_xla.sync()

    @compile(donate_argnums=0, **options)
    def step(parameters, x):
        return [p - 0.1 * g for p, g in zip(parameters, gradients(parameters, x, []))]

    parameters = step(parameters, x)
    places = [pointer(p) for p in parameters]
    before = metrics.counter_value("UncachedCompile")
    for _ in range(30):
        old = parameters
        parameters = step(parameters, x)
        assert all(map(is_donated, old))
        assert [pointer(p) for p in parameters] == places
    assert metrics.counter_value("UncachedCompile") == before


def test_the_report_counts_steps_after_backward_threads():
    """In a process of its own, since the number is of the process."""
    run_script(
        """
        import torch, torch_xla
        from torch_xla_donate import auto_donate, donate_buffer, donation_report

        def step(w, marks):
            leaf = w.detach().requires_grad_()
            if marks:
                donate_buffer(w)
            (gradient,) = torch.autograd.grad((leaf * leaf).sum(), leaf)
            new = w - 0.1 * gradient
            del gradient, leaf
            torch_xla.sync()
            return new

        w = torch.ones(3, device="xla")
        torch_xla.sync()
        assert donation_report().backward_threads == 0
        w = step(w, marks=True)
        w = step(w, marks=True)
        assert donation_report().backward_threads == 2
        text = str(donation_report())
        assert "Before 2 steps autograd ran on its own threads" in text, text
        assert "torch.autograd.set_multithreading_enabled(False)" in text
        with torch.autograd.set_multithreading_enabled(False):
            w = step(w, marks=True)
        assert donation_report().backward_threads == 2
        w = w + 1
        torch_xla.sync()
        with auto_donate():
            w = step(w, marks=False)
        assert donation_report().backward_threads == 3
        assert donation_report().to_dict()["backward_threads"] == 3
        """
    )
