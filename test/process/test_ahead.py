"""lower() and compile() in processes of their own: settings of the environment."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from children import in_process
from helpers import error_of
from torch_xla.core import xla_builder

from torch_xla_donate import DonationError, DonationWarning, compile


@pytest.mark.parametrize(
    ("name", "value", "pure"),
    [
        ("XLA_ENABLE_PARAM_ALIASING", "0", False),
        ("XLA_ENABLE_PARAM_ALIASING", "0", True),
        ("XLA_STABLEHLO_COMPILE", "1", False),
        ("XLA_AUTO_SPMD", "1", True),
    ],
)
@in_process(env=lambda name, value: {name: value})
def test_settings_that_ignore_donors_lower_without_and_warn_once(name, value, pure):
    def update(w, g):
        model.weight.data.sub_(g[:4])
        return w - g

    model = torch.nn.Linear(4, 4).to("xla")
    before = model.weight.tolist()
    w, g = torch.ones(8, 4).to("xla"), torch.ones(8, 4).to("xla")
    torch_xla.sync(wait=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A pure function does not update tensors of others.
        for f in (lambda w, g: w - g, *([] if pure else [update])):
            step = compile(f, donate_argnums=0, pure=pure)
            lowered = step.lower(w, g)
            assert not lowered.args_info[0][0].donated and "buffer_donor" not in lowered.as_text()
            executable = lowered.compile()
            assert executable.memory_analysis().alias_bytes == 0
            assert model.weight.tolist() == before
            assert executable(w, g).tolist() == [[0.0] * 4] * 8 and w.tolist() == [[1.0] * 4] * 8
    (warning,) = [w for w in caught if w.category is DonationWarning]
    assert f"{name}={value}" in str(warning.message) and " switches donation off" in str(warning.message)


@pytest.mark.filterwarnings("ignore::UserWarning")
@in_process
def test_auto_sharding_needs_arguments_with_memory():
    xr.use_spmd(auto=True)
    argument = xla_builder.create_placeholder_tensor((8, 4), torch.float32)
    lowered = compile(lambda x: x + 1, donate_argnums=0).lower(argument)
    error = error_of(DonationError, lowered.compile)
    assert error.startswith("<lambda> cannot be compiled for the placeholder float32[8,4], because torch_xla ")
    assert "call xr.use_spmd() and mark the shardings. See `python -m torch_xla_donate explain ahead`." in error
    t = torch.ones(8, 4).to("xla")
    assert (t + 1).tolist() == [[2.0] * 4] * 8
