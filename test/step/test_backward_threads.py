"""Autograd's own threads keep gradients into the step at random; compiled functions run autograd on the calling one."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch_xla
from helpers import each_backend

from torch_xla_donate import compile


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

    @compile(**options)
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
                compile(fail)(make(2))
            assert torch.autograd.is_multithreading_enabled() is before
