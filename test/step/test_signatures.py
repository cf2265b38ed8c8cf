"""A warning for a function with many signatures, and functions whose call is not a step."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from helpers import BACKENDS, error_of

from torch_xla_donate import _C, DonationWarning, compile, debug_nans, donation_disabled, expect_donated


def inputs(count):
    return [torch.ones(size + 1, device="xla") for size in range(count)]


@pytest.mark.parametrize("options", [{}, {"pure": True}, {"backend": "openxla", "dynamic": False}], ids=str)
def test_the_tenth_signature_warns_and_names_the_argument(options):
    torch._dynamo.reset()
    f = compile(lambda state, batch: (state["w"] + 1, batch["x"] * 2), donate_argnums=0, **options)
    with torch._dynamo.config.patch(recompile_limit=64):
        for x in inputs(9):
            f({"w": torch.ones(41, device="xla")}, {"x": x, "y": torch.ones(2, device="xla")})
        with pytest.warns(DonationWarning) as caught:
            f({"w": torch.ones(41, device="xla")}, {"x": torch.ones(99, device="xla"), "y": x[:2].clone()})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(3):  # once
                f({"w": torch.ones(41, device="xla")}, {"x": torch.ones(60 + number, device="xla"), "y": x[:2].clone()})
    (warning,) = [w for w in caught if "signatures" in str(w.message)]
    text = str(warning.message)
    assert f"<lambda> has been {'traced' if options.get('pure') else 'compiled'} for 10 signatures" in text
    assert "batch['x'] (argument 1 of <lambda>) differs: float32[1], float32[2], float32[3], float32[4], ..." in text
    assert warning.filename == __file__


def test_numbers_that_change_are_named(make):
    f = compile(lambda x, n, label: x * n, pure=True, static_argnums=2)
    x = make(3)
    for number in range(3):
        for label in "abc":
            f(x, number, label)
    with pytest.warns(DonationWarning, match=r"label \(argument 2 of <lambda>\) differs: 'a', 'b', 'c', 'd' \(1 other"):
        f(x, 0, "d")


def test_floats_and_repeated_signatures_do_not_warn(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pure = compile(lambda x, n: x * n, pure=True)
        lazy = compile(lambda x, n: x * n)
        for number in range(20):
            pure(make(3), number * 0.1)
            lazy(make(3), number * 0.1)
            lazy(make(3), number + 2)


def test_the_warning_as_an_error_loses_nothing(make):
    f = compile(lambda x: x + 1, donate_argnums=0, pure=True)
    xs = [make(size + 1) for size in range(10)]
    for x in xs[:9]:
        f(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DonationWarning, match="10 signatures"):
            f(xs[9])
    assert torch.equal(f(xs[9]).cpu(), torch.arange(10) + 1)


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
