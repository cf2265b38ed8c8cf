"""user_computation and call_jax in processes of their own: the HLO, eager mode, and a missing jax."""

from __future__ import annotations

import sys

import pytest
import torch
import torch_xla
from children import in_process, run_in_child
from computations import TEXT, from_stablehlo, from_text, jax, lowered
from helpers import error_of, make, pointer

from torch_xla_donate import DonationError, DonationWarning, call_jax, donation_report, hlo, user_computation


@in_process
def test_the_donors_of_modules_are_offered_and_aliased(dump_folder):
    """The step offers them, XLA aliases them, and the result has the donor's memory."""

    def step(run, *sizes):
        inputs = [torch.ones(size).to("xla") for size in sizes]
        torch_xla.sync(wait=True)
        place = pointer(inputs[-1])
        result = run(*inputs)
        torch_xla.sync(wait=True)
        assert pointer(result) == place

    def subtract_sum(gradient, weight):
        return weight - gradient.sum()

    # Each donates the second of two parameters; the sizes distinguish the steps.
    alias = lowered(subtract_sum, (3,), (101,), donate_argnums=1)
    step(lambda g, w: user_computation("alias", [g, w], alias)[0], 3, 101)
    donor = from_stablehlo(
        "%c = stablehlo.add %b, %b : tensor<102xf32> return %c : tensor<102xf32>",
        "%a: tensor<3xf32>, %b: tensor<102xf32> {jax.buffer_donor = true}",
        "tensor<102xf32>",
    )
    step(lambda g, w: user_computation("donor", [g, w], donor)[0], 3, 102)
    update = jax.jit(subtract_sum, donate_argnums=1)
    step(lambda g, w: call_jax(update, (g, w)), 3, 103)
    found = {}
    for module in hlo.read_dump(dump_folder):
        if module.donors:
            (donor,) = module.before.donors
            (aliased,) = module.after.aliases
            assert aliased.donor == donor
            found[str(module.shape_of(donor))] = str(module.after.results[aliased.output_index[0]])
    assert found == {"f32[101]": "f32[101]", "f32[102]": "f32[102]", "f32[103]": "f32[103]"}


def call_unsuitable_names() -> None:
    computation = from_text(TEXT.replace("main.1", "main"))
    t = torch.ones(4).to("xla")
    torch_xla.sync()
    result = torch_xla._XLAC._xla_user_computation("xla::m", [t], computation)
    torch_xla.sync()
    del result


def test_stock_torch_xla_ends_the_process_for_names_without_numbers():
    # The reason for looking at names: should torch_xla change, so may this package.
    done = run_in_child(call_unsuitable_names, exit_code=-6)
    assert "Check failed: pos != std::string::npos" in done.stderr


@pytest.mark.parametrize("missing", ["torchax", "jax"])
@in_process
def test_without_jax_or_torchax_an_error_says_what_to_install(missing):
    sys.modules[missing] = None  # Python's way to say that it is not to be found
    error = error_of(ImportError, call_jax, abs, (1,))
    assert error.startswith(f"call_jax needs jax and torchax: import of {missing} halted")
    assert error.endswith("pip install jax==0.7.1 jaxlib==0.7.1 torchax==0.0.13")


def weight_in_eager_mode():
    torch_xla.experimental.eager_mode(True)
    return make(4)


@in_process
def test_eager_mode_runs_the_computation_and_keeps_its_donors():
    """A warning and the report say so, also of inputs unfit for donation."""
    weight = weight_in_eager_mode()
    with pytest.warns(DonationWarning) as caught:
        halved = call_jax(jax.jit(lambda w: w / 2, donate_argnums=0), (weight,))
        torch_xla.sync()
    (warning,) = [w for w in caught if w.category is DonationWarning]
    assert "args[0] of <lambda>: eager mode runs each operation at once" in str(warning.message)
    assert halved.tolist() == [0, 0.5, 1, 1.5] and weight.tolist() == [0, 1, 2, 3]
    (donor,) = donation_report().donors
    assert donor.outcome == "unusable" and donor.reason.startswith("eager mode runs each operation at once")
    assert donation_report().pending == ()

    step = jax.jit(lambda w, g: w - g, donate_argnums=0)
    with pytest.warns(DonationWarning) as caught:
        assert call_jax(step, (weight, weight)).tolist() == [0, 0, 0, 0]
    (warning,) = [w for w in caught if w.category is DonationWarning]
    assert "args[0] of <lambda> is donated, and args[1] of <lambda>, which is not" in str(warning.message)
    with pytest.raises(ValueError, match="has the same buffer"):
        call_jax(step, (weight, weight), strict=True)


@pytest.mark.parametrize("environment", [{}, {"TORCH_XLA_DONATE_STRICT": "1"}], ids=["argument", "environment"])
@in_process(env=lambda environment: environment)
def test_a_strict_donation_in_eager_mode_is_an_error_each_time(environment):
    """The computation does not run."""
    weight = weight_in_eager_mode()
    halve = jax.jit(lambda w: w / 2, donate_argnums=0)
    for step in (1, 2):
        with pytest.raises(DonationError, match="args.0. of <lambda>: eager mode runs each operation at once"):
            call_jax(halve, (weight,), strict=None if environment else True)
        assert [donor.step for donor in donation_report().donors] == [*range(1, step + 1)]
    with pytest.warns(DonationWarning):
        assert call_jax(halve, (weight,), strict=False).tolist() == [0, 0.5, 1, 1.5]
