"""More parameters than torch_xla gives to a graph one by one: they come as one tuple, and its elements are donors."""

from __future__ import annotations

import pytest
from helpers import dump_env, run_script

from torch_xla_donate import hlo

pytestmark = pytest.mark.slow

# torch_xla's spelling. By default tuples begin at 3200 parameters.
WRAPPED = {"XLA_PARAMETER_WRAPPING_THREADSHOLD": "2"}

PRELUDE = """
import sys, warnings
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla_donate
from torch_xla_donate import *

def place(t):
    xm.wait_device_ops()
    return torch_xla._XLAC._unsafe_buffer_pointer(t)

def make(*values):
    t = torch.tensor(values).to("xla")
    torch_xla.sync(wait=True)
    return t
"""


def run(body, **options):
    return run_script(PRELUDE + body + "\nprint('end')\n", **options).stdout


def test_a_step_of_more_than_3200_parameters_donates_them_all(tmp_path):
    run(
        """
count = 3201
tensors = list(torch.arange(2.0 * count).reshape(count, 2).to("xla").unbind())
tensors = [tensor.clone() for tensor in tensors]
torch_xla.sync(wait=True)
before = [place(tensors[0]), place(tensors[-1])]
donate_buffer(tensors)
updated = [tensor + 1 for tensor in tensors]
torch_xla.sync(wait=True)
report = donation_report()
assert report and len(report.donors) == count and report.reused_fraction == 1.0
assert [place(updated[0]), place(updated[-1])] == before
assert torch.equal(torch.stack([t.cpu() for t in updated]), torch.arange(2.0 * count).reshape(count, 2) + 1)
""",
        env=dump_env(tmp_path),
    )
    (step,) = [module for module in hlo.read_dump(tmp_path) if module.before.donors]
    (parameter,) = step.before.parameters
    assert len(parameter.elements) >= 3201
    assert len(step.before.donors) == len(step.after.aliases) == 3201
    assert {donor.parameter_number for donor in step.before.donors} == {0}
    assert len({donor.parameter_index for donor in step.before.donors}) == 3201


def test_outcomes_warnings_and_pairs_are_those_of_single_parameters(tmp_path):
    output = run(
        """
for _ in range(2):
    a, b, c = make(1.0, 1.0), make(2.0, 2.0), make(3.0, 3.0)
    places = place(a), place(b)
    x, y = a + b + c, a - b - c
    donate_buffer([a, b], into=[y, x])
    torch_xla.sync(wait=True)
    assert (place(y), place(x)) == places
    assert (x.tolist(), y.tolist(), c.tolist()) == ([6, 6], [-4, -4], [3, 3])
    assert all(donor.into_kept for donor in donation_report(steps=1).donors)

a, b, c = make(1.0, 1.0), make(2.0, 2.0), make(3.0, 3.0, 3.0)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    donate_buffer({"a": a, "b": b, "c": c})
    x, z = a + b, c.sum()
    torch_xla.sync(wait=True)
(warning,) = [str(w.message) for w in caught if w.category is DonationWarning]
assert "f32[3] ['c']: no output of the step has its size of 12 bytes" in warning, warning
assert "more donors than outputs of its size: 2 donors and 1 output of 8 bytes" in warning, warning
assert (x.tolist(), z.item(), c.tolist()) == ([3, 3], 9, [3, 3, 3])
assert [is_donated(t) for t in (a, b, c)].count(True) == 1
try:
    (a if is_donated(a) else b) + 1
except DonatedBufferError:
    print("refused")
""",
        env={**WRAPPED, **dump_env(tmp_path)},
    )
    assert output == "refused\nend\n"
    steps = [module for module in hlo.read_dump(tmp_path) if module.before.donors]
    paired, partly = sorted(steps, key=lambda step: len(step.before.donors))
    assert {donor.parameter_index for donor in paired.before.donors} == {(0,), (1,)}
    assert {(alias.output_index, alias.parameter_index) for alias in paired.after.aliases} == {
        ((0,), (0,)),
        ((1,), (1,)),
    }
    assert len(partly.before.donors) == 3
    assert len(partly.after.aliases) == 1
    assert len(partly.after.donors) == 2


@pytest.mark.parametrize("options", ["", "pure=True", 'backend="openxla"'])
def test_compiled_functions_donate_elements_of_the_tuple(tmp_path, options):
    run(
        f"""
step = torch_xla_donate.compile(lambda a, b, c: (a + c, b * c), donate_argnums=(0, 1), {options})
c = make(3.0, 3.0)
a, b = make(1.0, 1.0), make(2.0, 2.0)
places = place(a), place(b)
for _ in range(3):
    before = a, b
    a, b = step(a, b, c)
    assert all(is_donated(t) for t in before)
assert (place(a), place(b)) == places
assert (a.tolist(), b.tolist(), c.tolist()) == ([10, 10], [54, 54], [3, 3])

lowered = step.lower(a, b, c)
assert len(torch_xla_donate.hlo.parse(lowered.as_text()).donors) == 2
executable = lowered.compile()
aliases = torch_xla_donate.hlo.parse(executable.as_text()).aliases
assert [(alias.parameter_number, len(alias.parameter_index)) for alias in aliases] == [(0, 1), (0, 1)]
assert executable.memory_analysis().alias_bytes == 16
assert a.tolist() == [10, 10]
""",
        env={**WRAPPED, **dump_env(tmp_path)},
    )
    donating = [module for module in hlo.read_dump(tmp_path) if module.before is not None and module.before.donors]
    assert donating
    for module in donating:
        assert [donor.parameter_number for donor in module.before.donors] == [0, 0]
        assert len(module.after.aliases) == 2


def test_sharded_elements_of_the_tuple_are_donated():
    run(
        """
import numpy
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
mesh = xs.Mesh(numpy.arange(2), (2,), ("x",))
state = {name: torch.arange(4.0).to("xla") for name in "abc"}
for tensor in state.values():
    xs.mark_sharding(tensor, mesh, ("x",))
torch_xla.sync(wait=True)
for _ in range(2):
    donate_buffer(state)
    old, state = state, {name: value * 2 for name, value in state.items()}
    torch_xla.sync(wait=True)
    assert all(is_donated(value) for value in old.values()), donation_report()
assert [value.tolist() for value in state.values()] == [[0, 4, 8, 12]] * 3
""",
        env={**WRAPPED, "CPU_NUM_DEVICES": "2", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )
