"""Python floats among the arguments of a pure function: inputs of the graph, with the promotion of a number."""

from __future__ import annotations

import enum
import itertools
import math
import operator
import re

import numpy
import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
from helpers import assert_keeps_nothing, compiles, error_of, lacking

from torch_xla_donate import DonationError, compile, donation_report, is_donated, scan

OPERATIONS = {
    "n * x": lambda x, n: n * x,
    "x * n": lambda x, n: x * n,
    "n + x": lambda x, n: n + x,
    "x + n": lambda x, n: x + n,
    "n - x": lambda x, n: n - x,
    "x - n": lambda x, n: x - n,
    "n / x": lambda x, n: n / x,
    "x / n": lambda x, n: x / n,
    "n ** x": lambda x, n: n**x,
    "x ** n": lambda x, n: x**n,
    "n // x": lambda x, n: n // x,
    "x // n": lambda x, n: x // n,
    "n % x": lambda x, n: n % x,
    "x % n": lambda x, n: x % n,
    "x == n": lambda x, n: x == n,
    "n < x": lambda x, n: n < x,
    "x >= n": lambda x, n: x >= n,
    "x + -n": lambda x, n: x + -n,
    "x * (1 - n)": lambda x, n: x * (1 - n),
    "x * (n / (1 - n ** 2))": lambda x, n: x * (n / (1 - n**2)),
    "x * (n + n * 2.5)": lambda x, n: x * (n + n * 2.5),
    "where(c, n, x)": lambda x, n: torch.where(x > 1, n, x),
    "where(c, x, n)": lambda x, n: torch.where(x > 1, x, n),
    "x.where": lambda x, n: x.where(x > 1, n),
    "where(c, n, 0.0)": lambda x, n: torch.where(x > 1, n, 0.0),
    "where(c, n, n)": lambda x, n: torch.where(x > 1, n, -n),
    "masked_fill": lambda x, n: x.masked_fill(x > 1, n),
    "lerp": lambda x, n: torch.lerp(x, x + x, n),
    "add alpha": lambda x, n: x.add(x + 2, alpha=n),
    "torch.sub alpha": lambda x, n: torch.sub(x, x + 2, alpha=-n),
    "add_ alpha": lambda x, n: x.clone().add_(x + 2, alpha=n),
    "add number, alpha": lambda x, n: x.add(2, alpha=n),
    "rsub alpha": lambda x, n: torch.rsub(x, x + 2, alpha=n),
    "addcmul": lambda x, n: x.addcmul(x, x + 1, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x, x + 1, value=-n),
    "index_fill value": lambda x, n: x.index_fill(0, torch.tensor([1], device=x.device), value=n),
    "masked_fill value": lambda x, n: x.masked_fill(x > 1, value=n),
    "keywords": lambda x, n: torch.add(input=x, other=n),
    "keywords alpha": lambda x, n: torch.add(input=x, other=x + 2, alpha=n),
    "keywords clamp": lambda x, n: torch.clamp(input=x, min=n),
    "clamp out": lambda x, n: torch.clamp(x, min=n, out=torch.zeros_like(x, dtype=torch.bfloat16)),
    "keywords where": lambda x, n: torch.where(condition=x > 1, input=x, other=n),
    "keywords addcmul": lambda x, n: x.addcmul(tensor1=x, tensor2=x + 1, value=n),
    "addcmul_": lambda x, n: x.clone().addcmul_(x, x + 1, value=n),
    "clamp": lambda x, n: x.clamp(min=n, max=2 + n),
    "clamp_max": lambda x, n: torch.clamp_max(x, n),
    "fmod": lambda x, n: torch.fmod(x, n),
    "div floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
    "mul_": lambda x, n: x.clone().mul_(n),
    "iadd": lambda x, n: operator.iadd(x.clone(), n),
    "number iadd": lambda x, n: operator.iadd(n, x),
    "fill_": lambda x, n: x.clone().fill_(n),
    "setitem": lambda x, n: _set(x.clone(), n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "full": lambda x, n: torch.full((3,), n, device=x.device),
    "full dtype": lambda x, n: torch.full((3,), n, device=x.device, dtype=x.dtype),
    "new_full": lambda x, n: x.new_full((2,), n),
    "tensor": lambda x, n: torch.tensor(n, device=x.device),
    "as_tensor": lambda x, n: torch.as_tensor(n, dtype=x.dtype, device=x.device),
    "scalar_tensor": lambda x, n: torch.scalar_tensor(n, device=x.device),
    "foreach_mul": lambda x, n: torch._foreach_mul([x, x + 1], n)[1],
    "foreach_add": lambda x, n: torch._foreach_add([x, x + 1], [x, x], alpha=n)[1],
    "foreach_addcdiv": lambda x, n: torch._foreach_addcdiv([x], [x], [x + 1], n)[0],
    "foreach_add_": lambda x, n: _foreach_add_([x.clone()], n)[0],
    "0-d": lambda x, n: n * x.sum(),
    "0-d and more": lambda x, n: (x.sum() * n) * x,
}


def _set(x, n):
    x[..., :1] = n
    return x


def _foreach_add_(tensors, n):
    torch._foreach_add_(tensors, n)
    return tensors


def _runs(f, *args) -> bool:
    try:
        f(*args)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


# torch_xla's quotient is rounded before the floor is taken; torch's for the CPU is not.
FLOORS = {"n // x", "x // n", "div floor"}
# With a constant XLA has another kernel: a power becomes a product.
INEXACT = {"x ** n", "n ** x", "number iadd"}


# `x % 0.3` for bool
ENDS = lacking(
    "2.8", "an operation that XLA refuses for a dtype ends the process (ConsumeValue; 2.9 throws)", run=False
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8]
DTYPES += [pytest.param(torch.bool, marks=ENDS)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_and_values_are_those_of_a_number(dtype):
    """Over a table of operations: the dtype of eager torch on the CPU, and its value if the CPU has one."""
    value = 0.3
    x = torch.tensor([1, 2, 3]).to(dtype)
    expected = {name: f(x, value) for name, f in OPERATIONS.items() if _runs(f, x, value)}
    on_device = x.to("xla")
    # torch_xla itself cannot do some of them for bool, nor promote for some others.
    known = [name for name in expected if _runs(lambda name=name: OPERATIONS[name](on_device, value).cpu())]
    assert len(known) >= (25 if dtype is torch.bool else 40)

    @compile(pure=True)
    def table(x, n):
        return {name: OPERATIONS[name](x, n) for name in known}

    found = table(on_device, value)
    assert {name: found[name].dtype for name in known} == {name: expected[name].dtype for name in known}
    tolerance = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-15}
    for name in set(known) - FLOORS:
        rtol = tolerance.get(expected[name].dtype, 1e-6)
        assert torch.allclose(found[name].cpu().double(), expected[name].double(), rtol=rtol, atol=rtol), name


@pytest.mark.parametrize("value", [0.003, 65536.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_in_16_bits_rounds_the_result_and_not_the_number(dtype, value):
    """float16 does not have 65536."""
    names = "n * x", "x * n", "x / n", "x * (1 - n)", "mul_"
    operations = {name: OPERATIONS[name] for name in names}
    operations["0-d"] = lambda x, n: n * x.max()
    operations["out"] = lambda x, n: torch.mul(x, n, out=torch.empty_like(x))
    x = torch.arange(1, 200).to(dtype) / 256
    found = compile(lambda x, n: {name: f(x, n) for name, f in operations.items()}, pure=True)(x.to("xla"), value)
    for name, f in operations.items():
        expected = f(x, value)
        assert found[name].dtype == expected.dtype == dtype
        assert torch.equal(found[name].cpu(), expected), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_bits_are_those_of_the_function_that_is_not_pure(dtype):
    on_device = torch.tensor([1, 2, 3]).to(dtype).to("xla")
    known = {
        name: f
        for name, f in OPERATIONS.items()
        if name not in INEXACT and _runs(lambda f=f: f(torch.tensor([1, 2, 3]).to(dtype), 0.3))
    }

    def table(x, n):
        return {name: f(x, n) for name, f in known.items()}

    plain, pure = compile(table)(on_device, 0.3), compile(table, pure=True)(on_device, 0.3)
    different = {
        name: (plain[name].cpu(), pure[name].cpu())
        for name in known
        if plain[name].dtype == pure[name].dtype and not torch.equal(plain[name].cpu(), pure[name].cpu())
    }
    assert different == {}


def test_a_float_is_converted_to_the_dtype_of_the_tensor_it_is_written_into(make):
    """float32 does not have this number."""
    value = 2.0**24 + 1

    @compile(pure=True)
    def written(x, n):
        x = x.clone()
        x[0] = n
        at = torch.arange(1, device=x.device)
        scattered = x.scatter(0, at, n), x.clone().scatter_(0, at, n)
        return x, torch.full_like(x, n), x.clone().fill_(n), torch.float_power(x, n / n), *scattered

    for found in written(make(3).to(torch.int64), value):
        assert found[0].item() == value


def test_one_trace_serves_a_schedule_of_learning_rates(make):
    @compile(donate_argnums=0, pure=True)
    def update(state, gradients, options):
        return {key: p - options["lr"] * gradients[key] for key, p in state.items()}

    state, gradients = {"w": make(4)}, {"w": make(4)}
    expected = state["w"].cpu()
    before = None
    for step in range(20):
        lr = 0.5 * 0.9**step
        old = state["w"]
        state = update(state, gradients, {"lr": lr, "name": "sgd", "steps": 3, "nesterov": False})
        expected = expected - lr * gradients["w"].cpu()
        assert is_donated(old)
        before = before or compiles()
    assert torch.allclose(state["w"].cpu(), expected, rtol=1e-6)
    assert len(update._programs) == 1
    assert compiles() == before
    assert all(donor.outcome == "donated" for donor in donation_report(steps=3).donors)


def test_special_values_and_computed_numbers_keep_their_precision(make):
    """They share the trace. A number that the function computes is a float64."""
    scale = compile(lambda x, n: (x + n, torch.full((1,), n, device="xla", dtype=torch.float64)), pure=True)
    x = make(2)
    for value in (math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, 5e-324, 1e300, 0.1):
        result, exact = scale(x, value)
        assert torch.equal(result.cpu(), x.cpu() + value) or math.isnan(value)
        assert numpy.float64(exact.item()).tobytes() == numpy.float64(value).tobytes() or math.isnan(value)
        assert result.isnan().all().item() is math.isnan(value)
    assert len(scale._programs) == 1

    @compile(pure=True)
    def f(x, n, m):
        n *= m
        n -= 1
        return x + n / 3

    x, half = make(3, dtype=torch.float64), 0.5
    for n, m in ((half, half), (0.1, 0.7)):  # traced with one object in two places
        assert torch.equal(f(x, n, m).cpu(), x.cpu() + (n * m - 1) / 3)


def test_ints_bools_strings_enums_and_static_floats_are_static(make):
    traces = []

    class Rate(float, enum.Enum):
        LOW = 0.5

    @compile(pure=True)
    def f(x, option):
        traces.append(option)
        return x * 2 if option else x

    @compile(pure=True, static_argnums=1)
    def g(x, n):
        traces.append(n)
        return x * math.sqrt(n) if n > 0.1 else x

    x = make(2)
    for option in (1, True, "a", Rate.LOW, None, 2, 1):
        f(x, option)
    assert traces == [1, True, "a", Rate.LOW, None, 2]
    traces.clear()
    for value in (0.25, 0.05, 0.25, 0.0, -0.0):
        g(x, value)
    assert [str(value) for value in traces] == ["0.25", "0.05", "0.0", "-0.0"]


def test_numpy_floats_share_the_trace_and_promote_as_numbers(make):
    f = compile(lambda x, n: x * n, pure=True)
    x = make(3).bfloat16()
    torch_xla.sync()
    for kind in (numpy.float64, numpy.float32, numpy.float16):
        for value in (0.5, 0.25):
            result = f(x, kind(value))
            assert result.dtype == torch.bfloat16
            assert torch.equal(result.cpu(), x.cpu() * value)
    assert len(f._programs) == 1


def test_a_default_float_is_a_constant_and_an_argument_an_input(make):
    traces = []

    @compile(pure=True)
    def f(x, n=0.5):
        traces.append(type(n))
        return x * n

    x = make(3)
    assert torch.equal(f(x).cpu(), x.cpu() * 0.5)
    for value in (0.25, 0.125):
        assert torch.equal(f(x, value).cpu(), x.cpu() * value)
        assert torch.equal(f(x, n=value).cpu(), x.cpu() * value)
    assert len(traces) == 3
    assert traces[0] is float
    assert all(issubclass(kind, torch.Tensor) for kind in traces[1:])


HOST_USES = {
    "branch": lambda x, n: x if n > 0.1 else -x,
    "derived": lambda x, n: x if 1 - n * 2 else -x,
    "math": lambda x, n: x * math.sqrt(n),
    "round": lambda x, n: x * round(n, 1),
    "trunc": lambda x, n: x * math.trunc(n),
    "divmod": lambda x, n: x * divmod(n, 2)[0],
    "rdivmod": lambda x, n: x * divmod(2, n)[0],
    "is_integer": lambda x, n: x * n.is_integer(),
    "numpy": lambda x, n: x * numpy.sqrt(n),
    "an array of numpy": lambda x, n: x * float((numpy.ones(2) * n)[0]),
    "float": lambda x, n: x * float(n),
    "int": lambda x, n: x * int(n),
    "item": lambda x, n: x * n.item(),
    "format": lambda x, n: (f"{n}", x)[1],
    "repr": lambda x, n: (repr(n), x)[1],
    "hash": lambda x, n: {0.3: x}.get(n, -x),
    "a tensor on the host": lambda x, n: torch.tensor(n).to("xla") * x,
    "a tensor of a list": lambda x, n: torch.tensor([n, 1.5, 2 * n], device=x.device) * x,
    "full on the host": lambda x, n: torch.full((3,), n).to("xla") * x,
    "dropout": lambda x, n: torch.nn.functional.dropout(x, n),
    "softplus": lambda x, n: torch.nn.functional.softplus(x, n),
    "arange": lambda x, n: torch.arange(0, n, 0.1, device="xla"),
    "scatter": lambda x, n: torch.scatter(x, 0, torch.tensor([1], device="xla"), value=n),
    "pad": lambda x, n: torch.nn.functional.pad(x, (1, 1), value=n),
    "elu": lambda x, n: torch.nn.functional.elu(x, alpha=n),
    "out": lambda x, n: torch.add(x, x, alpha=n, out=torch.zeros(3, device="xla")),
}


def test_a_use_on_the_host_is_refused_with_the_remedy(make):
    x = make(3)
    for name, use in HOST_USES.items():
        found = error_of(DonationError, compile(use, pure=True), x, 0.3)
        assert re.search(r"test_pure_floats.py:\d+ it reads n \(argument 1 of <lambda>\) on the", found), (name, found)
        assert "static_argnums" in found, name
        assert torch.equal(compile(lambda x, n: x * n, pure=True)(x, 0.5).cpu(), x.cpu() * 0.5)

    @compile(pure=True)
    def f(x, options):
        return x if options["a"]["lr"] * options["wd"] > 1 else -x

    with pytest.raises(DonationError, match=r"reads options\['a'\]\['lr'\] .*, options\['wd'\] \(argument 1 of f\) on"):
        f(x, {"a": {"lr": 0.1}, "wd": 0.2})
    kept = []
    text = r"it gets the argument float64\[\], which something outside"
    with pytest.raises(DonationError, match=text):
        compile(lambda x, n: (kept.append(n), x * n)[1], pure=True)(x, 0.5)
    kept.clear()
    with pytest.raises(RuntimeError, match="argument alpha must not be a floating point number"):
        compile(lambda x, n: x.long().add(x.long(), alpha=n), pure=True)(x, 0.5)


def test_donated_and_returned_floats_are_those_of_the_call(make):
    @compile(donate_argnums=0, pure=True, strict=True)
    def f(state, n):
        new = {**state, "w": state["w"] * n, "v": state["v"] + state["decay"]}
        return new, n, n * 2, n > 0.5

    state = {"w": make(3), "decay": 0.5, "v": make(5)}
    for value in (0.25, 0.75):
        old = state
        state, same, twice, larger = f(state, value)
        assert is_donated(old["w"]) and is_donated(old["v"])
        assert same == value and type(same) is float
        assert state["decay"] == 0.5
        assert twice.dtype == torch.float32 and twice.item() == 2 * value
        assert larger.dtype == torch.bool and larger.item() is (value > 0.5)
        assert type(twice) is torch.Tensor
    assert torch.equal(state["v"].cpu(), torch.arange(5) + 1.0)


def test_gradients_flow_beside_a_number(make):
    @compile(pure=True)
    def f(w, n, scale):
        w = w.detach().requires_grad_()
        loss = ((w * n) ** 2).sum() * scale
        (gradient,) = torch.autograd.grad(loss, w)
        return gradient, w.detach() - n * gradient

    w = make(3).bfloat16()
    torch_xla.sync()
    for n in (0.5, 0.25):
        gradient, new = f(w, n, 2.0)
        assert gradient.dtype == new.dtype == torch.bfloat16
        assert torch.equal(gradient.cpu(), (4 * n * n * w.cpu()))


def test_filling_with_a_number_cuts_the_gradient(make):
    @compile(pure=True)
    def f(w, n):
        w = w.detach().requires_grad_()
        filled = (w * 2).fill_(n)
        (gradient,) = torch.autograd.grad((filled * w).sum(), w)
        return gradient

    assert f(make(3), 0.5).tolist() == [0.5] * 3


def test_the_floats_of_a_call_are_uploaded_at_once_if_they_are_read(make):
    """In a vector: torch_xla's cache of single numbers neither grows nor loses one."""

    def uploads(f):
        x = f(make(3), 0.3, 0.4)
        torch_xla.sync(wait=True)
        before = metrics.metric_data("TransferToDeviceTime")[0]
        for step in range(10):
            x = f(x, 1.0 + step * 1e-3, 2.0)
        return metrics.metric_data("TransferToDeviceTime")[0] - before

    assert uploads(compile(lambda x, n, m: x * n + m, donate_argnums=0, pure=True)) == 10
    assert uploads(compile(lambda x, n, m: x + 1, donate_argnums=0, pure=True)) == 0
    assert torch.tensor(0.3, device="xla").item() == pytest.approx(0.3)
    assert (torch.tensor(0.3, device="xla") + torch.tensor(1.001, device="xla")).item() == pytest.approx(1.301)


def test_two_thousand_rates_leave_no_memory():
    f = compile(lambda state, x, n: state * n + x, donate_argnums=0, pure=True)
    rates = itertools.count()
    assert_keeps_nothing(lambda state, x: f(state, x, 1.0 - next(rates) * 1e-9))
    assert len(f._programs) == 1


def test_lower_takes_the_float_as_an_input(make):
    f = compile(lambda state, n: state * n, donate_argnums=0, pure=True)
    x = make(4)
    lowered = f.lower(x, 0.5)
    assert "f64[1]" in lowered.as_text()
    executable = lowered.compile()
    before = compiles()
    for value in (0.5, 0.25):
        x = executable(x, value)
    assert compiles() == before
    assert torch.equal(x.cpu(), torch.arange(4) * 0.125)
    with pytest.raises(TypeError, match="compiled for"):
        executable(x, 1)


def test_a_float_in_the_body_of_a_loop_has_a_remedy(make):
    def closing(init, xs, n):
        return scan(lambda carry, x: (carry + n * x, carry), init, xs)

    def passing(init, xs, n):
        def body(carry, x):
            total, factor = carry
            return (total + factor * x, factor), total

        return scan(body, (init, torch.full((), n, device="xla")), xs)

    init, xs = make(2), make(3, 2)
    with pytest.raises(DonationError, match=r"uses n \(argument 2 of closing\), a Python float, in the body of a loop"):
        compile(closing, pure=True)(init, xs, 0.5)
    static = compile(closing, pure=True, static_argnums=2)
    pure = compile(passing, pure=True)
    for n in (0.5, 0.25):
        expected = init.cpu() + n * xs.cpu().sum(0)
        assert torch.equal(static(init, xs, n)[0].cpu(), expected)
        assert torch.equal(pure(init, xs, n)[0][0].cpu(), expected)
    assert len(pure._programs) == 1
