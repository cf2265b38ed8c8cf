"""compile() with donation disabled: the end of the call checks outputs, and later uses cause warnings."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_xla

from torch_xla_donate import DonationWarning, compile, debug_nans, donation_disabled, donation_report, is_donated

WAYS = [{}, {"pure": True}, {"backend": "openxla"}]
EACH_WAY = pytest.mark.parametrize("way", WAYS, ids=["lazy", "pure", "openxla"])


@EACH_WAY
def test_a_use_of_a_would_be_consumed_argument_warns_at_its_line(make, way):
    step = compile(lambda x, y: x + y, donate_argnums=0, **way)
    x, y = make(3), make(3)
    with donation_disabled(report_reuse=True):
        result = step(x, y)
        with pytest.warns(DonationWarning, match=r"f32\[3\] tensor 'x \(argument 0 of <lambda>\)' is used after"):
            assert (x + 1).tolist() == [1, 2, 3]
        assert (y + 1).tolist() == [1, 2, 3]
    assert result.tolist() == [0, 2, 4] and not is_donated(x)
    (donor,) = donation_report(steps=1).donors
    assert (donor.outcome, donor.reason) == ("unusable", "donation is disabled (donation_disabled())")


@EACH_WAY
def test_disabled_donation_warns_of_nothing(make, way):
    """It ends with its context."""
    step = compile(lambda x: x * 2, donate_argnums=0, **way)
    x = make(3)
    with warnings.catch_warnings(), donation_disabled():
        warnings.simplefilter("error")
        step(x)
        assert (x + 1).tolist() == [1, 2, 3]
    torch_xla.sync()
    kept = step(x)
    assert is_donated(x)
    del kept


@EACH_WAY
def test_a_nan_is_found_at_the_calls_end_and_arguments_live(make, way):
    step = compile(lambda x: (x / x, x + 1), donate_argnums=0, **way)
    x = make(3)
    with debug_nans(), pytest.raises(FloatingPointError, match=r"f32\[3\]: 1 NaN of 3 values"):
        step(x)
    assert x.tolist() == [0, 1, 2]
    assert not torch_xla._XLAC._get_use_eager_mode() and torch_xla._XLAC._get_allow_execution()
    assert torch.equal(step(x + 1)[1].cpu(), torch.tensor([2.0, 3.0, 4.0]))


@EACH_WAY
def test_a_pending_clone_is_an_argument_of_its_own(make, way):
    step = compile(lambda x, y: x + y, donate_argnums=0, **way)
    x = make(3)
    clone = x.clone()
    result = step(x, clone)
    assert is_donated(x) and result.tolist() == [0, 2, 4] and clone.tolist() == [0, 1, 2]
    y = make(3)
    result = step(y.clone(), y)
    assert not is_donated(y) and result.tolist() == [0, 2, 4] and y.tolist() == [0, 1, 2]


@EACH_WAY
def test_a_use_inside_a_compiled_function_warns_at_its_call(make, way):
    step, again = compile(lambda x: x + 1, donate_argnums=0, **way), compile(lambda x: x * 2, **way)
    x = make(3)
    with donation_disabled(report_reuse=True):
        kept = step(x)
        with pytest.warns(DonationWarning) as caught:
            again(x)
    assert {warning.filename for warning in caught} == {__file__}
    del kept
