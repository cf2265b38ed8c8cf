"""debug_nans in separate processes: SPMD, failing steps, its environment variable, and the end of the interpreter."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
from children import in_process
from helpers import error_of, run_script
from sharding import mesh, shard

from torch_xla_donate import _C, DonationWarning, debug_nans, donate_buffer, donation_report, is_donated

SWITCHED_ON = {"TORCH_XLA_DONATE_DEBUG_NANS": "1"}


@in_process(devices=4)
def test_sharded_outputs_are_checked_and_sharded_donors_reported(make):
    mesh()
    s, other = (shard(torch.ones(8, 4).to("xla"), "x", None) for _ in range(2))
    r = make(8, 3) * 0 + 1
    torch_xla.sync(wait=True)
    with debug_nans():
        bad = [s * 2, torch.log(s - 2), torch.log(r - 2)]
        text = error_of(FloatingPointError, torch_xla.sync)
        assert "output 1 of 3 of the step, f32[8,4]: 32 NaN of 32 values" in text
        assert "output 2 of 3 of the step, f32[8,3]: 24 NaN of 24 values" in text
        del bad
        # One output per device has the bytes of one of the two sharded donors; the replicated one has none.
        donate_buffer([s, other, r])
        out = s + other + r.sum()
        torch_xla.sync()
    assert _C.sizes()["undonated"] == 1
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        values = [s + 1, other + 1, r + 1]
    assert [w.category for w in warned] == [DonationWarning]
    assert out.cpu()[0, 0].item() == 26
    assert values[0].cpu()[0, 0].item() == 2


@in_process
def test_a_step_that_fails_raises_its_error_and_spares_nothing(make):
    t = make(8)
    with debug_nans():
        donate_buffer(t)
        outputs = [t + 1, t.reshape(8, 1, 1, 1).expand(8, 1 << 20, 1 << 20, 1 << 10) + 1]
        errors = []
        for wait in (False, True):
            # The first one may only start the run; torch_xla raises its failure at the latest in the second one.
            try:
                torch_xla.sync(wait=wait)
            except RuntimeError as error:
                errors.append(str(error))
            outputs.clear()
        assert errors
        assert all("memory" in error for error in errors)
        assert _C.sizes()["undonated"] == 0
        # A warning would be an error.
        assert (t + 1).tolist() == list(range(1, 9))


@in_process(env=SWITCHED_ON)
def test_the_environment_switches_it_on_for_all_threads(make):
    def step(t):
        donate_buffer(t)
        out = torch.log(t - 10)
        with pytest.raises(FloatingPointError, match=r"f32\[4\]: 4 NaN of 4 values"):
            torch_xla.sync()
        del out
        assert not is_donated(t)
        assert t.tolist() == [0, 1, 2, 3]

    step(make(4))
    (donor,) = donation_report().donors
    assert donor.reason == "donation is disabled (TORCH_XLA_DONATE_DEBUG_NANS=1)"
    with ThreadPoolExecutor() as other:
        other.submit(lambda: step(make(4))).result()
    # A context adds infinities, and a use is reported.
    with debug_nans(infs=True):
        t = make(4)
        donate_buffer(t)
        infinite = 1 / (t * 0)
        with pytest.raises(FloatingPointError, match="4 infinite"):
            torch_xla.sync()
        del infinite
    assert _C.disabled()
    donate_buffer(t)
    out = t * 2
    torch_xla.sync()
    with pytest.warns(DonationWarning, match="is used after it was donated"):
        assert t.tolist() == [0, 1, 2, 3]
    assert out.tolist() == [0, 2, 4, 6]


def test_the_last_compiled_graph_is_checked_at_interpreter_end():
    done = run_script(
        """
        import torch, torch_xla, torch_xla_donate
        t = torch.ones(4).to("xla")
        torch_xla.sync(wait=True)
        last = torch.compile(lambda x: torch.log(x - 2), backend="openxla")(t)
        """,
        env=SWITCHED_ON,
    )
    assert "FloatingPointError: 1 output is not finite.\n  output 0 of 1 of a compiled graph" in done.stderr
