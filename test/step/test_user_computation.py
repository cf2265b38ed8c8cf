"""user_computation and call_jax: what an HLO module or a jitted JAX function donates reaches the step."""

from __future__ import annotations

import functools

import pytest
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from computations import TEXT, from_stablehlo, from_text, jax, lowered, sgd
from helpers import compiles, error_of, lacking, pointer

import torch_xla_donate
from torch_xla_donate import (
    DonatedBufferError,
    DonationError,
    DonationWarning,
    call_jax,
    debug_nans,
    donate_buffer,
    donation_disabled,
    donation_report,
    gradient_accumulation,
    hlo,
    is_donated,
    scan,
    user_computation,
)

ADD_AND_MULTIPLY = """
    %sum = stablehlo.add %a, %b : tensor<4xf32>
    %product = stablehlo.multiply %a, %b : tensor<4xf32>
    return %sum, %product : tensor<4xf32>, tensor<4xf32>
"""
PAIR = "tensor<4xf32>, tensor<4xf32>"


def reports():
    """The donors of the last step: name and outcome."""
    return {donor.name: donor.outcome for donor in donation_report(steps=1).donors}


# --- HLO modules ---


def test_only_the_parameter_that_the_module_aliases_is_donated(make):
    computation = lowered(sgd, (4,), (4,), donate_argnums=0)
    for _ in range(2):
        weight, gradient = make(4), make(4)
        place = pointer(weight)
        (result,) = user_computation("sgd", [weight, gradient], computation)
        torch_xla.sync()
        assert result.tolist() == [0, 0.5, 1, 1.5]
        assert (is_donated(weight), is_donated(gradient), pointer(result)) == (True, False, place)
    (donor,) = donation_report(steps=1).donors
    assert (donor.name, donor.outcome, donor.into_kept) == ("inputs[0] of sgd", "donated", True)
    assert "test_user_computation.py" in donor.where
    with pytest.raises(DonatedBufferError, match=r"f32\[4\] tensor 'inputs\[0\] of sgd' .*test_user_computation.py"):
        weight + 1
    with pytest.raises(DonatedBufferError, match=r"'inputs\[0\] of sgd'"):
        user_computation("sgd", [weight, gradient], computation)


@pytest.mark.parametrize("of_tuple", [False, True])
def test_a_buffer_donor_of_the_module_is_donated(make, of_tuple):
    """Also if the module has one parameter, a tuple, whose arrays are the inputs."""
    arguments = "%a: tensor<4xf32>, %b: tensor<4xf32> {jax.buffer_donor = true}"
    computation = from_stablehlo(ADD_AND_MULTIPLY, arguments, PAIR, use_tuple_args=of_tuple)
    expected = hlo.BufferDonor(0, (1,)) if of_tuple else hlo.BufferDonor(1, ())
    assert hlo.parse(xb.get_computation_hlo(computation)).donors == (expected,)
    a, b = make(4), make(4)
    total, product = user_computation("both", [a, b], computation)
    torch_xla.sync()
    assert (total.tolist(), product.tolist()) == ([0, 2, 4, 6], [0, 1, 4, 9])
    assert (is_donated(a), is_donated(b)) == (False, True)
    assert reports() == {"inputs[1] of both": "donated"}


def test_outputs_take_over_the_buffers_that_the_module_names(make):
    # Crosswise: by order, XLA would pair the first with the first.
    arguments = "%a: tensor<4xf32> {tf.aliasing_output = 1 : i32}, %b: tensor<4xf32> {tf.aliasing_output = 0 : i32}"
    computation = from_stablehlo(ADD_AND_MULTIPLY, arguments, PAIR)
    a, b = make(4), make(4)
    places = pointer(a), pointer(b)
    total, product = user_computation("crossed", [a, b], computation)
    torch_xla.sync()
    assert (pointer(product), pointer(total)) == places
    assert [donor.into_kept for donor in donation_report(steps=1).donors] == [True, True]


def test_a_module_without_donation_is_called_as_by_torch_xla(make):
    shapes = [xb.Shape.create("f32", (4,))] * 2
    for root in (lambda a, b: a * b, lambda a, b: xb.Op.tuple([a * b, a])):
        computation = xb.create_computation("product", root, shapes)
        a, b = make(4), make(4)
        expected = torch_xla._XLAC._xla_user_computation("xla::product", [a, b], computation)
        found = user_computation("product", [a, b], computation)
        assert donation_report().pending == ()
        torch_xla.sync()
        assert [t.tolist() for t in found] == [t.tolist() for t in expected]
        assert (is_donated(a), is_donated(b)) == (False, False)


def test_a_loop_compiles_once(make):
    computation = lowered(sgd, (5,), (5,), donate_argnums=0)
    update = jax.jit(sgd, donate_argnums=0)
    weight, other, gradient = make(5), make(5), make(5)
    places = pointer(weight), pointer(other)
    for step in range(6):
        if step == 2:
            compiled = compiles()
        (weight,) = user_computation("sgd", [weight, gradient], computation)
        other = call_jax(update, (other, gradient))
        torch_xla.sync()
    assert compiles() == compiled
    assert (pointer(weight), pointer(other)) == places
    assert weight.tolist() == other.tolist() == [0, -2, -4, -6, -8]


# --- What is refused ---


def test_inputs_that_do_not_fit_the_computation_are_refused(make):
    computation = lowered(sgd, (4,), (4,), donate_argnums=0)
    other = make(2) + 1
    good = make(4)
    for inputs, kind, text in [
        ([good], ValueError, "takes 2 arrays, but inputs has 1. Pass one tensor for each of these: f32[4], f32[4]"),
        ([good, make(3)], ValueError, "inputs[1] of sgd is f32[3], but the computation takes f32[4]"),
        ([make(4, dtype=torch.int32), good], ValueError, "inputs[0] of sgd is s32[4], but the"),
        ([good, torch.ones(4)], ValueError, "inputs[1] of sgd is float32[4] on cpu, but a computation"),
        ([good, 3.0], TypeError, "inputs[1] of sgd is of type float, but a computation takes only XLA tensors"),
    ]:
        for _ in range(2):
            found = error_of(kind, user_computation, "sgd", inputs, computation)
            assert text in found, found
    with pytest.raises(TypeError, match="computation is of type bytes, not a computation of torch_xla"):
        user_computation("sgd", [good], b"")
    assert donation_report().pending == ()
    assert other.tolist() == [1, 2]


TUPLE_DONOR = """HloModule m, buffer_donor={ (0, {}) }, entry_computation_layout={((f32[4]{0}))->f32[4]{0}}

ENTRY main.1 {
  a.2 = (f32[4]{0}) parameter(0)
  ROOT b.3 = f32[4]{0} get-tuple-element(a.2), index=0
}
"""


ENDS = "a computation that the builder cannot import ends the process (ConsumeValue; 2.9 throws)"


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (TEXT.replace("main.1", "main"), r"computation m has the name 'main', and.*such as main\.1"),
        (TEXT.replace("b.3", "b"), r"computation m has the name 'b', and.*such as b\.1"),
        (TUPLE_DONOR, r"donates \(0, \{\}\), which is a tuple .* such as \(0, \{0\}\)"),
        pytest.param(
            TEXT,
            "torch_xla cannot call computation m: Computation . not found in builder",
            marks=lacking("2.8", ENDS, run=False),
        ),
    ],
    ids=["main", "name", "tuple", "builder"],
)
def test_a_module_that_the_step_cannot_call_is_refused_before(make, text, refusal):
    """Its names would end the process, its donor is a tuple, or torch_xla cannot build it."""
    other = make(2) + 1
    with pytest.raises(ValueError, match=refusal):
        user_computation("text", [make(4)], from_text(text))
    torch_xla.sync()
    assert other.tolist() == [1, 2]


def refused(make):
    base = make(4)
    return {
        "pending": (make(4) + 1, "has no buffer yet"),
        "view": (base[:], "a view, which torch_xla computes from its base"),
        "constant": (torch.tensor(7.0).to("xla"), "a cached constant or the RNG seed"),
    }


def test_a_module_without_a_parameter_or_with_a_nested_result_is_refused(make):
    parameter = xb.mkparam(xb.create_builder("nested"), 0, xb.mkshape(xb.Type.F32, (3,)))
    nested = xb.Op.tuple([parameter, xb.Op.tuple([parameter])]).build("nested")
    constant = xb.Op.scalar(xb.create_builder("constant"), 2.0, dtype=xb.Type.F32).build("constant")
    for computation, inputs in ((nested, [make(3)]), (constant, [])):
        message = error_of(ValueError, user_computation, "f", inputs, computation)
        assert "because it takes no array, or returns a tuple in a tuple" in message
    assert "name is of type int" in error_of(TypeError, user_computation, 5, [make(3)], nested)


@pytest.mark.parametrize(("kind", "jitted"), [("pending", False), ("view", False), ("constant", False), ("view", True)])
def test_an_input_unfit_for_donation_is_an_error_or_a_warning(make, kind, jitted):
    tensor, text = refused(make)[kind]
    if kind == "constant":
        torch_xla.sync()
    both = jax.jit(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1))

    def run(tensor, other, **options):
        if jitted:
            return call_jax(both, (tensor, other), **options)
        return user_computation(
            "both", [tensor, other], lowered(both, tensor.shape, (3,), donate_argnums=(0, 1)), **options
        )

    other = make(3) if kind == "constant" else torch.arange(3.0).to("xla")
    if kind != "constant":
        # Uploaded, and the other one still pending.
        torch_xla._XLAC._xla_sync_multi([other], [], True, True)
    name = r"args\[0\] of <lambda>" if jitted else r"inputs\[0\] of both"
    for strict in (None, True):
        with pytest.raises(DonationError, match=f"{name} is float32.* on xla:0.*{text}.*Nothing was marked"):
            run(tensor, other, strict=strict)
    assert donation_report().pending == ()
    with pytest.warns(DonationWarning, match=rf"float32\[.*\] {name} \(donated at .*\n.*{text}"):
        first, second = run(tensor, other, strict=False)
    assert [donor.shape for donor in donation_report().pending] == [(3,)]
    torch_xla.sync()
    assert torch.equal(first.cpu(), tensor.cpu() + 1)
    assert second.tolist() == [0, 2, 4]
    assert (is_donated(tensor), is_donated(other)) == (False, True)
    if kind == "constant":
        assert torch.tensor(7.0).to("xla").item() == 7


def test_a_tensor_that_is_given_away_and_kept_is_refused(make):
    computation = lowered(sgd, (4,), (4,), donate_argnums=0)
    t = make(4)
    text = r"inputs\[0\] of sgd is donated, and inputs\[1\] of sgd, which is not, has the same buffer"
    with pytest.raises(ValueError, match=text):
        user_computation("sgd", [t, t.detach()], computation)
    with pytest.warns(DonationWarning, match=text):
        (result,) = user_computation("sgd", [t, t], computation, strict=False)
    torch_xla.sync()
    assert not is_donated(t)
    assert (result.tolist(), t.tolist()) == ([0, 0.5, 1, 1.5], [0, 1, 2, 3])
    with pytest.raises(
        ValueError, match=r"kwargs\['rate'\] of <lambda> is donated, and args\[0\] of <lambda>, which is not"
    ):
        call_jax(jax.jit(lambda a, rate: a + rate, donate_argnames="rate"), (t,), {"rate": t})
    assert donation_report().pending == ()


def test_a_tensor_that_is_given_away_twice_is_one_donor(make):
    t = make(4)
    result = call_jax(jax.jit(sgd, donate_argnums=(0, 1)), (t, t))
    torch_xla.sync()
    assert (is_donated(t), result.tolist()) == (True, [0, 0.5, 1, 1.5])
    assert len(donation_report(steps=1).donors) == 1


def test_an_unusable_donation_warns_or_raises(make):
    computation = lowered(lambda a: a.sum(), (3,))
    assert user_computation("sum", [make(3)], computation)[0].item() == 3
    text = r"inputs\[0\] of sum: no output of the step has its size of 12 bytes"
    donor = from_stablehlo(
        "%zero = stablehlo.constant dense<0.0> : tensor<f32>  return %zero : tensor<f32>",
        "%a: tensor<3xf32> {jax.buffer_donor = true}",
        "tensor<f32>",
    )
    kept = user_computation("sum", [make(3)], donor)
    with pytest.warns(DonationWarning, match=text):
        torch_xla.sync(wait=True)
    kept += user_computation("sum", [make(3)], donor, strict=True)
    with pytest.raises(DonationError, match=text):
        torch_xla.sync(wait=True)
    assert [t.item() for t in kept] == [0, 0]


# --- Inside loops and compiled functions ---


@pytest.mark.parametrize("backend", [{}, {"pure": True}], ids=["lazy", "pure"])
def test_in_a_compiled_function_only_its_arguments_are_donated(make, backend):
    update = jax.jit(sgd, donate_argnums=(0, 1))
    computation = lowered(lambda a, b: (a - 0.5 * b, b), (4,), (4,), donate_argnums=(0, 1))

    @functools.partial(torch_xla_donate.compile, donate_argnums=0, **backend)
    def step(weight, gradient):
        weight, gradient = user_computation("sgd", [weight, gradient], computation)
        return call_jax(update, (weight, gradient))

    for _ in range(2):
        weight, gradient = make(4), make(4)
        result = step(weight, gradient)
        torch_xla.sync()
        assert (is_donated(weight), is_donated(gradient)) == (True, False)
        assert result.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("context", [donation_disabled, debug_nans])
def test_disabled_donation_donates_nothing(make, context):
    weight, gradient = make(4), make(4)
    with context():
        result = call_jax(jax.jit(sgd, donate_argnums=0), (weight, gradient))
        torch_xla.sync(wait=True)
    assert reports() == {"args[0] of sgd": "unusable"}
    assert not is_donated(weight)
    assert result.tolist() == [0, 0.5, 1, 1.5]


def test_a_body_of_gradient_accumulation_donates_its_carry(make):
    model = torch.nn.Linear(4, 1).to("xla")
    computation = lowered(sgd, (6,), (6,), donate_argnums=0)
    carried, other, ones = make(6), make(6), torch.ones(6).to("xla")
    torch_xla.sync()

    def step(x, carried, other):
        (new,) = user_computation("sgd", [carried, ones], computation)
        return model(x).sum(), new, other * 2

    _, carried_after, other_after = gradient_accumulation(step, (make(3, 2, 4),), model, carried, other)
    torch_xla.sync()
    assert (is_donated(carried), is_donated(other), is_donated(ones)) == (True, False, False)
    assert carried_after.tolist() == [-1.5, -0.5, 0.5, 1.5, 2.5, 3.5]
    assert other_after[1].item() == 8


def test_torch_xla_calls_no_computation_in_the_body_of_a_scan(make):
    # As documented: should torch_xla come to do it, the page must change.
    computation = lowered(sgd, (4,), (4,), donate_argnums=0)
    init, xs = make(4), make(3, 4)
    with pytest.raises(
        RuntimeError, match=r"Expected all tensors .* to be XLA tensors|Check failed: xtensor"
    ):  # 2.9, 2.8
        scan(lambda carry, x: (user_computation("sgd", [carry, x], computation)[0], x), init, xs)
    assert donation_report().pending == ()


def test_an_earlier_mark_keeps_its_name(make):
    weight, gradient = make(4), make(4)
    donate_buffer({"mine": gradient})
    (result,) = user_computation("sgd", [weight, gradient], lowered(sgd, (4,), (4,), donate_argnums=0))
    second = gradient + 1
    torch_xla.sync()
    assert reports() == {"inputs[0] of sgd": "donated", "['mine']": "donated"}
    assert (result.tolist(), second.tolist()) == ([0, 0.5, 1, 1.5], [1, 2, 3, 4])


# --- JAX functions ---


def adam(state, gradients, *, rate):
    return {name: value - rate * gradients[name] for name, value in state.items()}


def trees(make):
    return {"a": make(3), "b": make(2, 2)}, {"a": make(3), "b": make(2, 2)}


def test_every_array_of_a_donated_pytree_is_donated(make):
    update = jax.jit(adam, donate_argnums=0)
    state, gradients = trees(make)
    places = {name: pointer(value) for name, value in state.items()}
    new = call_jax(update, (state, gradients), {"rate": 1.0})
    torch_xla.sync()
    assert {name: pointer(value) for name, value in new.items()} == places
    assert all(map(is_donated, state.values())) and not any(map(is_donated, gradients.values()))
    assert reports() == {"args[0]['a'] of adam": "donated", "args[0]['b'] of adam": "donated"}
    assert new["b"].tolist() == [[0, 0], [0, 0]]


def test_outputs_take_over_the_buffers_that_jax_would_give_them(make):
    # The graph reads the second before the first, and XLA pairs in that order by default.
    a, b = make(4), make(4)
    places = pointer(a), pointer(b)
    kept = b * b
    results = call_jax(jax.jit(lambda a, b: (a + 1, b * 2), donate_argnums=(0, 1)), (a, b))
    total = kept.sum()
    del kept
    torch_xla.sync()
    assert (tuple(map(pointer, results)), total.item()) == (places, 14)
    assert [donor.into_kept for donor in donation_report(steps=1).donors] == [True, True]


def test_arguments_given_by_keyword_are_donated(make):
    for options in ({"donate_argnames": "gradients"}, {"donate_argnums": 1}):
        state, gradients = trees(make)
        new = call_jax(jax.jit(adam, **options), (state,), {"gradients": gradients, "rate": 0.0})
        torch_xla.sync()
        assert all(map(is_donated, gradients.values())) and not any(map(is_donated, state.values()))
        assert reports() == {
            "kwargs['gradients']['a'] of adam": "donated",
            "kwargs['gradients']['b'] of adam": "donated",
        }
        assert new["a"].tolist() == [0, 1, 2]


def test_static_arguments_do_not_shift_the_donated_ones(make):
    def scaled(kind, x, times, y, *, flag, z):
        assert (kind, flag) == ("k", True)
        return x * times, y + 1, z["z"] - 1

    update = jax.jit(scaled, static_argnums=(0, 2), static_argnames="flag", donate_argnums=3, donate_argnames="z")
    x, y, z = make(2), make(3), make(4)
    results = call_jax(update, ("k", x, 3, y), {"flag": True, "z": {"z": z}})
    torch_xla.sync()
    assert [t.tolist() for t in results] == [[0, 3], [1, 2, 3], [-1, 0, 1, 2]]
    assert [is_donated(t) for t in (x, y, z)] == [False, True, True]


def test_numbers_and_none_among_donated_arguments_are_skipped(make):
    update = jax.jit(lambda state, g: state["w"] - state["rate"] * g, donate_argnums=0)
    weight, gradient = make(4), make(4)
    result = call_jax(update, ({"w": weight, "rate": 0.5, "none": None}, gradient))
    torch_xla.sync()
    assert (is_donated(weight), result.tolist()) == (True, [0, 0.5, 1, 1.5])


def test_functions_without_donors_are_called_as_by_torch_xla(make):
    inner = jax.jit(sgd, donate_argnums=0)
    for f in (
        sgd,
        jax.jit(sgd),
        functools.partial(inner),
        lambda a, b: {"x": inner(a, b)},
        jax.jit(lambda a, b: inner(a, b)),
    ):
        weight, gradient = make(4), make(4)
        expected = xb.call_jax(f, (weight, gradient))
        found = call_jax(f, (weight, gradient))
        assert donation_report().pending == ()
        torch_xla.sync()
        assert str(found) == str(expected)
        assert not is_donated(weight)


def test_a_function_is_traced_once_for_each_signature_or_hash(make):
    traces = []

    def made():
        def f(a):
            traces.append(a.shape)
            return a + 1

        return jax.jit(f, donate_argnums=0)

    f = made()
    for size in (4, 4, 5):
        t = make(size)
        result = call_jax(f, (t,))
        torch_xla.sync()
        assert is_donated(t) and result.tolist() == list(range(1, size + 1))
    for _ in range(3):
        t = make(6)
        result = call_jax(made(), (t,), override_hash="made")
        torch_xla.sync()
        assert is_donated(t) and result[0].item() == 1
    assert traces == [(4,), (5,), (6,)]


def test_functions_of_one_hash_donate_their_own_arguments(make):
    def add(a, b):
        return a + b

    for number in (1, 0):
        given = make(4), make(4)
        result = call_jax(jax.jit(add, donate_argnums=number), given, override_hash="add")
        torch_xla.sync()
        assert [is_donated(t) for t in given] == [number == 0, number == 1]
        assert result.tolist() == [0, 2, 4, 6]
    given = make(4), make(4)
    call_jax(jax.jit(add), given, override_hash="add")
    torch_xla.sync()
    assert not any(map(is_donated, given))


class Vectors:
    """Takes only arrays, and is registered without keys."""

    def __init__(self, first, second):
        assert hasattr(first, "shape") and hasattr(second, "shape")
        self.first, self.second = first, second


def test_a_class_that_is_registered_without_keys_is_donated(make):
    jax.tree_util.register_pytree_node(Vectors, lambda v: ([v.first, v.second], None), lambda _, v: Vectors(*v))
    given = Vectors(make(4), make(3))
    results = call_jax(jax.jit(lambda v: (v.first + 1, v.second + 1), donate_argnums=0), (given,))
    torch_xla.sync()
    assert is_donated(given.first) and is_donated(given.second) and results[1].tolist() == [1, 2, 3]
    assert set(reports()) == {"args[0][<flat index 0>] of <lambda>", "args[0][<flat index 1>] of <lambda>"}


def test_arguments_that_jax_cannot_take_are_refused(make):
    wide = make(4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"args\[1\] of sgd is int64\[4\], but JAX works with 32 bits"):
        call_jax(jax.jit(sgd, donate_argnums=0), (make(4), wide))
    inlined = jax.jit(lambda n, a: a * n, static_argnums=0, donate_argnums=1, inline=True)
    with pytest.raises(DonationError, match="<lambda> is jitted with static arguments and inline=True"):
        call_jax(inlined, (2, make(4)))
    with pytest.raises(ValueError, match=r"args\[0\] of sgd is float32\[4\] on cpu, but only plain XLA tensors"):
        call_jax(jax.jit(sgd, donate_argnums=0), (torch.ones(4), make(4)))
    assert donation_report().pending == ()
