"""Tensors whose size only the device knows (XLA_EXPERIMENTAL): refused as donors, and told where they are outputs."""

from __future__ import annotations

import pytest
from helpers import RAISES, dump_env, run_script

from torch_xla_donate import hlo

pytestmark = pytest.mark.slow

PRELUDE = """
import sys, warnings
import torch, torch_xla
import torch_xla_donate
from torch_xla_donate import *
from torch_xla_donate import _C

def make():
    t = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0]).to("xla")
    torch_xla.sync(wait=True)
    return t

def selected(t):
    found = torch.masked_select(t, t > 0.5)
    torch_xla.sync(wait=True)
    return found
"""

DYNAMIC = {"XLA_EXPERIMENTAL": "nonzero:masked_select"}


def run(body, **options):
    return run_script(PRELUDE + RAISES + body + "\nprint('end')\n", **options).stdout


def test_a_tensor_of_dynamic_size_is_refused_and_stays():
    run(
        """
t = make()
found = selected(t)
assert str(found.shape[0]) == "<=5"
message = raises(DonationError, lambda: donate_buffer([t, found]))
assert message.startswith("tensors[1] is float32[<=5] on xla:0, a tensor whose size only the device knows"), message
assert _C.sizes()["pending"] == 0  # all or nothing
for options in ({}, {"pure": True}, {"backend": "openxla"}):
    step = torch_xla_donate.compile(lambda x: x, donate_argnums=0, **options)
    raises((DonationError, ValueError), lambda: step(found))
    kept = torch_xla_donate.compile(lambda x, y: x + 1, donate_argnums=0, **options)
    if options.get("pure"):
        message = raises(ValueError, lambda: kept(t, found))
        assert "Use the lazy backend, without pure=True." in message, message
    else:
        x = make()
        assert kept(x, found).tolist() == [1, 2, 1, 3, 4] and is_donated(x)
assert not is_donated(found) and found.cpu().tolist() == [1, 2, 3]
assert _C.sizes()["pending"] == 0
""",
        env=DYNAMIC,
    )


def test_a_step_with_an_output_of_dynamic_size_donates_nothing_and_the_report_says_why(tmp_path):
    run(
        """
for f in (lambda t: torch.masked_select(t, t > 1.5), lambda t: (t * 2, torch.masked_select(t, t > 1.5))):
    t = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        donate_buffer(t)
        results = f(t)
        torch_xla.sync(wait=True)
    (donor,) = donation_report(steps=1).donors
    reason = "an output has a size that only the device knows, f32[<=5], and XLA aliases nothing in such a graph"
    assert (donor.outcome, donor.reason) == ("unusable", reason), donor
    results = results if isinstance(results, tuple) else (results,)
    assert results[-1].cpu().tolist() == [2, 3] and t.tolist() == [0, 1, 0, 2, 3]

# Where donation is disabled, its use is not foretold either.
t = make()
with warnings.catch_warnings(record=True) as caught, donation_disabled(report_reuse=True):
    warnings.simplefilter("always", DonationWarning)
    donate_buffer(t)
    found = torch.masked_select(t, t > 1.5)
    torch_xla.sync(wait=True)
    assert (t + 1).tolist() == [1, 2, 1, 3, 4]
assert not [w for w in caught if w.category is DonationWarning], caught

# The next step donates.
donate_buffer(t)
out = t + 1
torch_xla.sync(wait=True)
assert is_donated(t) and out.tolist() == [1, 2, 1, 3, 4]
""",
        env={**DYNAMIC, **dump_env(tmp_path)},
    )
    steps = [module for module in hlo.read_dump(tmp_path) if module.before is not None and module.before.donors]
    dynamic = [step for step in steps if any(shape.dynamic for shape in step.before.result.elements)]
    assert len(dynamic) == 2
    for step in dynamic:
        assert step.after.aliases == ()
        assert len(step.after.donors) == 1
    (static,) = [step for step in steps if step not in dynamic]
    assert len(static.after.aliases) == 1


def test_operations_on_dynamic_sizes_fail_on_cpu_with_or_without_this_package():
    # What cannot be tested here: a step that reads a tensor of dynamic size.
    output = run_script(
        """
        import sys
        import torch, torch_xla

        t = torch.tensor([0.0, 1.0, 2.0]).to("xla")
        found = torch.masked_select(t, t > 0.5)
        torch_xla.sync(wait=True)
        try:
            found * 2
        except RuntimeError as error:
            print(error)
        print("torch_xla_donate" in sys.modules)
        """,
        env=DYNAMIC,
    ).stdout
    assert output == "Custom call target PadToStatic is not implemented.\nFalse\n"
