"""Tensors whose size only the device knows (XLA_EXPERIMENTAL): refused as donors, and a reason where they are outputs.

One case cannot be tested here: a step that reads a tensor of dynamic size. torch_xla's CPU backend fails, with or
without this package.
"""

from __future__ import annotations

import inspect
import os
import warnings

import bare
import pytest
import torch
import torch_xla
from children import in_process, run_in_child
from helpers import BACKENDS, consume, error_of, lose

import torch_xla_donate
from torch_xla_donate import (
    _C,
    DonatedBufferError,
    DonationError,
    DonationWarning,
    Reason,
    auto_donate,
    donate_buffer,
    donation_disabled,
    donation_report,
    hlo,
    is_donated,
)

DYNAMIC = {"XLA_EXPERIMENTAL": "nonzero:masked_select"}


def make() -> torch.Tensor:
    t = torch.tensor([0.0, 1.0, 0.0, 2.0, 3.0]).to("xla")
    torch_xla.sync(wait=True)
    return t


@in_process(env=DYNAMIC)
def test_a_tensor_of_dynamic_size_is_refused_and_stays():
    t = make()
    found = torch.masked_select(t, t > 0.5)
    torch_xla.sync(wait=True)
    assert str(found.shape[0]) == "<=5"
    message = "tensors[1] is float32[<=5] on xla:0, a tensor whose size only the device knows"
    assert error_of(DonationError, donate_buffer, [t, found]).startswith(message)
    assert _C.sizes()["pending"] == 0  # all or nothing
    for options in BACKENDS.values():
        step = torch_xla_donate.compile(lambda x: x, donate_argnums=0, **options)
        with pytest.raises((DonationError, ValueError)):
            step(found)
        kept = torch_xla_donate.compile(lambda x, y: x + 1, donate_argnums=0, **options)
        if options.get("pure"):
            with pytest.raises(ValueError, match=r"Use the lazy backend, without pure=True\."):
                kept(t, found)
        else:
            x = make()
            assert kept(x, found).tolist() == [1, 2, 1, 3, 4] and is_donated(x)
    assert not is_donated(found) and found.cpu().tolist() == [1, 2, 3]
    assert _C.sizes()["pending"] == 0


@in_process(env=DYNAMIC)
def test_a_step_with_an_output_of_dynamic_size_donates_nothing(dump_folder):
    """The report gives the reason."""
    reason = "an output has a size that only the device knows, f32[<=5], and XLA aliases nothing in such a graph"
    for f in (lambda t: [torch.masked_select(t, t > 1.5)], lambda t: [t * 2, torch.masked_select(t, t > 1.5)]):
        t = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            donate_buffer(t)
            results = f(t)
            torch_xla.sync(wait=True)
        (donor,) = donation_report(steps=1).donors
        assert (donor.outcome, donor.reason) == ("unusable", reason)
        assert results[-1].cpu().tolist() == [2, 3] and t.tolist() == [0, 1, 0, 2, 3]

    # With donation disabled, nothing predicts that the step would use the donor.
    t = make()
    with warnings.catch_warnings(record=True) as caught, donation_disabled(report_reuse=True):
        warnings.simplefilter("always", DonationWarning)
        donate_buffer(t)
        found = torch.masked_select(t, t > 1.5)
        torch_xla.sync(wait=True)
        assert (t + 1).tolist() == [1, 2, 1, 3, 4]
    assert not [w for w in caught if w.category is DonationWarning]
    assert found.cpu().tolist() == [2, 3]

    # The next step donates.
    assert consume(t, wait=True).tolist() == [1, 2, 1, 3, 4]

    steps = [module for module in hlo.read_dump(dump_folder) if module.before is not None and module.before.donors]
    dynamic = [step for step in steps if any(shape.dynamic for shape in step.before.result.elements)]
    assert len(dynamic) == 2
    for step in dynamic:
        assert step.after.aliases == ()
        assert len(step.after.donors) == 1
    (static,) = [step for step in steps if step not in dynamic]
    assert len(static.after.aliases) == 1


def pending_size(t: torch.Tensor) -> torch.SymInt:
    """The number of elements above 0.5, which nothing has computed yet: a transposed view has its own node."""
    return torch.nonzero(t > 0.5).t().size(1)


def sum_of_sizes(t: torch.Tensor) -> torch.SymInt:
    size = pending_size(t)
    return size + size


@pytest.mark.parametrize(("size_of", "value"), [(pending_size, 3), (sum_of_sizes, 6)])
@in_process(env=DYNAMIC)
def test_nothing_is_donated_automatically_where_a_size_may_be_pending(size_of, value):
    """No live tensor has its graph, which stays after the size has been computed."""
    t = make() + 1
    size = size_of(t - 1)
    os.environ.pop("XLA_EXPERIMENTAL")  # torch_xla has read it
    with auto_donate():
        for skipped in (1, 2):
            t = t + 1
            torch_xla.sync(wait=True)
            assert donation_report().auto_refusals == {Reason.SYMBOLIC_SIZES.sentence: skipped}
        assert int(size) == value
        assert consume(t, wait=True).tolist() == [4, 5, 4, 6, 7]


@in_process()
def test_a_program_without_the_setting_makes_no_such_size():
    t = make()
    found = [torch.nonzero(t), torch.masked_select(t, t > 0), torch.unique(t), t[t > 0], torch.argwhere(t)]
    found += [torch.repeat_interleave(t, torch.tensor([1, 2, 3, 1, 1]).to("xla")), torch.bincount(t.long())]
    assert [each.numel() for each in found] == [3, 3, 4, 3, 3, 8, 4]
    with auto_donate():
        t = t + 1
        torch_xla.sync(wait=True)
    assert [donor.outcome for donor in donation_report().donors] == ["donated"]
    assert not donation_report().auto_refusals


@in_process(env=DYNAMIC)
def test_a_pending_size_of_a_marked_tensor_names_the_mark():
    """Nothing else is lost."""
    t, other = make(), make()
    size = pending_size(t)
    out = consume(t, wait=True)
    line = inspect.currentframe().f_lineno - 1
    pending = other * 2
    for _ in range(2):
        with pytest.raises(DonatedBufferError, match=rf"f32\[5\] tensor .*test_dynamic_sizes.py:{line}"):
            int(size)
    assert pending.tolist() == [0, 2, 0, 4, 6] and out.tolist() == [1, 2, 1, 3, 4]
    assert consume(out, wait=True).tolist() == [2, 3, 2, 4, 5]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
@in_process(env=DYNAMIC)
def test_a_pending_size_does_not_donate_its_input_after_the_mark_is_over():
    """torch_xla donates an input whose note names an output.

    While a step is compiled, the notes on its donors name one of its outputs. Here no operation writes a new note
    afterwards: a size has the graph that reads the donor, and the next step updates that output in place.
    """
    t, one, five = make(), torch.ones(1).to("xla"), torch.ones(5).to("xla")
    torch_xla.sync(wait=True)
    size = pending_size(t)
    total = lose(t)
    (donor,) = donation_report(steps=1).donors
    assert donor.outcome == "unusable"
    total.add_(torch.ops.aten.expand_copy(one, [size]).sum())
    out = five * total
    torch_xla.sync(wait=True)
    assert t.tolist() == [0, 1, 0, 2, 3] and out.tolist() == [9] * 5


@pytest.mark.parametrize("package", [False, True], ids=["stock", "with the package"])
def test_operations_on_dynamic_sizes_fail_on_cpu(package):
    """With or without this package."""
    message, imported = run_in_child(bare.read_dynamic_size, package, env=DYNAMIC).value
    assert message == "Custom call target PadToStatic is not implemented."
    assert imported == package
