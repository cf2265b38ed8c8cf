"""More parameters than torch_xla gives to a graph one by one: they come as one tuple, and its elements are donors."""

from __future__ import annotations

import torch
import torch_xla
from children import in_process
from helpers import consume, each_backend, pointer
from ranks import make
from sharding import mesh, shard

from torch_xla_donate import compile, donate_buffer, donation_report, hlo, is_donated

# torch_xla's spelling. By default tuples begin at 3200 parameters.
WRAPPED = {"XLA_PARAMETER_WRAPPING_THREADSHOLD": "2"}


@in_process
def test_a_step_of_more_than_3200_parameters_donates_them_all(dump_folder):
    count = 3201
    # One by one from the host: XLA takes minutes to compile one array's 3,201 slices.
    tensors = [row.to("xla") for row in torch.arange(2.0 * count).reshape(count, 2)]
    torch_xla.sync(wait=True)
    before = [pointer(tensors[0]), pointer(tensors[-1])]
    updated = consume(tensors, lambda tensors: [tensor + 1 for tensor in tensors], wait=True)
    report = donation_report()
    assert report
    assert len(report.donors) == count
    assert report.reused_fraction == 1.0
    assert [pointer(updated[0]), pointer(updated[-1])] == before
    assert torch.equal(torch.stack([t.cpu() for t in updated]), torch.arange(2.0 * count).reshape(count, 2) + 1)

    (step,) = [module for module in hlo.read_dump(dump_folder) if module.before.donors]
    (parameter,) = step.before.parameters
    assert len(parameter.elements) >= 3201
    assert len(step.before.donors) == len(step.after.aliases) == 3201
    assert {donor.parameter_number for donor in step.before.donors} == {0}
    assert len({donor.parameter_index for donor in step.before.donors}) == 3201


@in_process(env=WRAPPED)
def test_pairs_are_kept_as_without_a_tuple(dump_folder):
    for _ in range(2):
        a, b, c = make(1.0, 1.0), make(2.0, 2.0), make(3.0, 3.0)
        places = pointer(a), pointer(b)
        x, y = a + b + c, a - b - c
        donate_buffer([a, b], into=[y, x])
        torch_xla.sync(wait=True)
        assert (pointer(y), pointer(x)) == places
        assert (x.tolist(), y.tolist(), c.tolist()) == ([6, 6], [-4, -4], [3, 3])
        assert all(donor.into_kept for donor in donation_report(steps=1).donors)

    (paired,) = [module for module in hlo.read_dump(dump_folder) if module.before.donors]
    donors = {donor.parameter_index for donor in paired.before.donors}
    assert len(donors) == 2
    assert {alias.parameter_index for alias in paired.after.aliases} == donors
    assert {alias.output_index for alias in paired.after.aliases} == {(0,), (1,)}


@each_backend
@in_process(env=WRAPPED)
def test_compiled_functions_donate_elements_of_the_tuple(dump_folder, options):
    step = compile(lambda a, b, c: (a + c, b * c), donate_argnums=(0, 1), **options)
    c = make(3.0, 3.0)
    a, b = make(1.0, 1.0), make(2.0, 2.0)
    places = pointer(a), pointer(b)
    for _ in range(3):
        before = a, b
        a, b = step(a, b, c)
        assert all(is_donated(t) for t in before)
    assert (pointer(a), pointer(b)) == places
    assert (a.tolist(), b.tolist(), c.tolist()) == ([10, 10], [54, 54], [3, 3])

    lowered = step.lower(a, b, c)
    assert len(hlo.parse(lowered.as_text()).donors) == 2
    executable = lowered.compile()
    aliases = hlo.parse(executable.as_text()).aliases
    assert [(alias.parameter_number, len(alias.parameter_index)) for alias in aliases] == [(0, 1), (0, 1)]
    assert executable.memory_analysis().alias_bytes == 16
    assert a.tolist() == [10, 10]

    donating = [module for module in hlo.read_dump(dump_folder) if module.before is not None and module.before.donors]
    assert donating
    for module in donating:
        assert [donor.parameter_number for donor in module.before.donors] == [0, 0]
        assert len(module.after.aliases) == 2


@in_process(env=WRAPPED, devices=2)
def test_sharded_elements_of_the_tuple_are_donated():
    mesh()
    state = {name: shard(torch.arange(4.0).to("xla"), "x") for name in "abc"}
    torch_xla.sync(wait=True)
    for _ in range(2):
        state = consume(state, lambda state: {name: value * 2 for name, value in state.items()}, wait=True)
    assert [value.tolist() for value in state.values()] == [[0, 4, 8, 12]] * 3
