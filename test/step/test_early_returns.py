"""Functions that return before their body has run are refused."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers import BACKENDS, error_of

from torch_xla_donate import _C, compile, debug_nans, donation_disabled, expect_donated


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
            found = error_of(TypeError, compile, function, **options)
            assert text in found and "Compile a function that returns its results" in found, (text, options, found)
        modes = () if isinstance(function, Module) else (donation_disabled, debug_nans, expect_donated)
        for mode in modes:
            found = error_of(TypeError, mode(), function)
            kind, remedy = text.partition(",")[0].partition(" is ")[2], f"`with {mode.__name__}():` inside its body"
            assert f" is {kind}, and" in found and remedy in found, (text, mode, found)
    with pytest.raises(TypeError, match="Compile a function that returns its results"):
        compile(donate_argnums=0)(generator)
    assert donation_disabled()(_C.disabled)()
