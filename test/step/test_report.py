"""donation_report: its fields, its text, and the reasons it gives."""

from __future__ import annotations

import html
import json

import numpy as np
import pytest
import torch
import torch_xla
from helpers import consume, whole_copy

from torch_xla_donate import (
    _C,
    Reason,
    _host,
    cancel_donation,
    compile,
    donate_buffer,
    donation_disabled,
    donation_report,
    hlo,
    is_donated,
)
from torch_xla_donate._report.explain import StepSizes


def test_a_report_of_a_step_in_which_all_was_used(make):
    consume({"w": make(8, 2)}, lambda state: state["w"] + 1)
    report = donation_report(steps=1)
    (donor,) = report.donors
    assert (donor.name, donor.shape, donor.dtype, donor.array, donor.bytes) == ("['w']", (8, 2), "f32", "f32[8,2]", 64)
    assert (donor.outcome, donor.reason, donor.device) == ("donated", "", "CPU:0")
    assert donor.where.startswith(__file__)
    assert report
    assert report.donated_bytes == 64
    assert report.reused_fraction == 1.0


def test_a_step_that_is_kept_for_reports_refers_to_no_consumed_buffer(make):
    """Its weak reference would keep the memory of the object, which has its counters."""
    consumed, unusable = make(8), make(3)
    donate_buffer([consumed, unusable], strict="off")
    _outs = consumed + 1, unusable.sum()
    torch_xla.sync(wait=True)
    buffers = {donor["outcome"]: donor["buffer"] for donor in _C.steps()[-1]["donors"]}
    assert buffers == {"donated": 0, "unusable": _C.identity(unusable)[1]}
    assert is_donated(consumed)


def test_a_report_without_donors_is_false(monkeypatch):
    monkeypatch.setattr(_C, "steps", lambda last=None: [])
    monkeypatch.setattr(_C, "auto_held", list)
    report = donation_report()
    assert not report
    assert (report.donors, report.donated_bytes, report.reused_fraction) == ((), 0, 0.0)
    assert str(report).splitlines()[0] == "No step has had a donor yet."


def test_a_donor_has_the_element_type_of_its_buffer(make):
    """Not of its tensor: torch_xla computes the indices of cummax, which are int64, as s32."""
    names = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64"
    names += " complex64 complex128 float8_e4m3fn float8_e5m2"
    tensors = {name: torch.zeros(3).to(getattr(torch, name)).to("xla") for name in names.split()}
    tensors["indices"] = torch.cummax(make(3), 0)[1]
    torch_xla.sync()
    arrays = {f"['{name}']": _host.array_of(tensor) for name, tensor in tensors.items()}
    donate_buffer(tensors, strict="off")
    _outs = [_host.computed(tensor) for tensor in tensors.values()]
    torch_xla.sync()
    donors = {donor.name: donor for donor in donation_report(steps=1).donors}
    assert {name: donor.array for name, donor in donors.items()} == {name: str(a) for name, a in arrays.items()}
    assert {name: donor.bytes for name, donor in donors.items()} == {name: a.bytes for name, a in arrays.items()}
    assert (donors["['indices']"].array, donors["['indices']"].bytes) == ("s32[3]", 12)


def test_donors_of_no_bytes_count(make):
    used, lost = torch.ones(0, 3).to("xla"), torch.ones(0, 2).to("xla")
    out = consume(used, wait=True)
    report = donation_report(steps=1)
    assert [(donor.array, donor.bytes, donor.outcome) for donor in report.donors] == [("f32[0,3]", 0, "donated")]
    assert report
    assert report.reused_fraction == 1.0
    # Two donors of no bytes and one output of no bytes.
    value = make(3)
    donate_buffer([value, lost, out], strict="off")
    _outs = value + lost.sum(), out + 1
    torch_xla.sync(wait=True)
    report = donation_report(steps=1)
    assert sorted(donor.outcome for donor in report.donors) == ["donated", "donated", "unusable"]
    assert report.reused_fraction == 1.0
    assert not report


def test_steps_are_kept_for_the_last_eight(make):
    value = make(16)
    for _ in range(12):
        value = consume(value)
    report = donation_report()
    steps = [donor.step for donor in report.donors]
    assert len(steps) == 8
    assert steps == sorted(steps)
    assert [donor.step for donor in donation_report(steps=2).donors] == steps[-2:]
    assert len(report.steps) == len(donation_report(steps=50).steps) == 8
    assert len(donation_report(steps=np.int32(3)).steps) == 3
    for steps in ("2", True, 1.0):
        with pytest.raises(TypeError, match="steps is of type (str|bool|float), not an int"):
            donation_report(steps=steps)
    with pytest.raises(ValueError, match="steps is 0. Pass 1 or more, or None"):
        donation_report(steps=0)


def test_many_donors_are_cut_in_the_text_and_not_in_the_data(make):
    out = consume([make(3) for _ in range(50)], lambda tensors: [t + 1 for t in tensors])
    report = donation_report(steps=1)
    assert len(report.to_dict()["donors"]) == len(out) == 50
    assert "\n... and 10 more; see .to_dict()" in str(report)


def donor(size, array=""):
    whole = _C.bytes_per_device(array) or size
    return {"bytes": size, "bytes_per_device": whole, "size": _C.size_on_device(array) or size, "array": array}


@pytest.mark.parametrize(
    ("donors", "outputs", "expected", "reason"),
    [
        ([8], ["f32[3]{0}", "s64[]"], Reason.OUTPUTS_TAKEN, None),
        (
            [12, 12],
            ["f32[3]{0}"],
            Reason.MORE_DONORS_THAN_OUTPUTS,
            "more donors than outputs of its size: 2 donors and 1 output of 12 bytes",
        ),
        (
            [16],
            ["f32[3]{0}", "f32[3]{0}"],
            Reason.NO_OUTPUT_OF_ITS_SIZE,
            "no output of the step has its size of 16 bytes (outputs: 2 of 12 bytes)",
        ),
        ([12], ["f32[3]{0}"], Reason.OUTPUTS_TAKEN, "every 12-byte output already reuses another input"),
        ([12], [""], Reason.OUTPUTS_GONE, "XLA did not use it; outputs of the step are gone"),
        ([12], ["", "f32[2]{0}"], Reason.OUTPUTS_GONE, "XLA did not use it; outputs of the step are gone"),
    ],
)
def test_the_reason_follows_from_the_sizes(donors, outputs, expected, reason):
    code, text = StepSizes(outputs, donors).explain(donor(donors[0]))
    assert code is expected
    assert text.startswith(reason or "every 8-byte output already reuses another input")


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
def test_refused_donors_do_not_compete(make):
    updated, lost, shared = make(6), make(6), make(6)
    _holder = whole_copy(shared)
    updated.add_(1)
    _total = lost.sum() + shared.sum()
    donate_buffer([lost, shared])
    torch_xla.sync(wait=True)
    reasons = {donor.name: donor.reason_code for donor in donation_report(steps=1).donors}
    assert reasons == {"[0]": Reason.OUTPUTS_TAKEN, "[1]": Reason.HELD_BY_OTHERS}


def test_the_sizes_of_a_step_are_read_once(make, monkeypatch):
    """Its reasons take time in proportion to its donors."""
    measured = []
    size_on_device = _C.size_on_device
    monkeypatch.setattr(_C, "size_on_device", lambda text: measured.append(text) or size_on_device(text))
    lost = [make(5 + i) for i in range(30)]
    donate_buffer(lost, strict="off")
    total = [t.sum() for t in lost]
    torch_xla.sync(wait=True)
    donors = donation_report(steps=1).donors
    assert {donor.reason_code for donor in donors} == {Reason.NO_OUTPUT_OF_ITS_SIZE}
    assert len(donors) == len(total) == len(measured)


def test_the_reason_names_shardings_that_keep_the_sizes_apart():
    sharded = donor(32, "f32[8]{0} sharding={devices=[4]0,1,2,3}")
    outputs = ["f32[8]{0} sharding={replicated}", "f32[] sharding={replicated}"]
    assert StepSizes(outputs, [32]).explain(sharded) == (
        Reason.SHARDED_DIFFERENTLY,
        "an output has its size of 32 bytes, but not per device: the donor, sharded {devices=[4]0,1,2,3}, takes "
        "8 bytes on each device, and the output f32[8], sharded {replicated}, takes 32; shard donor and output alike",
    )


# --- Codes, numbers and compilations ---


def test_a_partly_used_step_weighs_by_bytes_and_shows_first_what_went_wrong(make):
    """Donors have codes, and pending marks are listed apart."""
    used, unused, pending = make(30), make(10), make(4)
    donate_buffer({"used": used, "unused": unused, "pending": pending}, strict="off")
    _out = used + unused.sum()
    torch_xla.sync()
    report = donation_report(steps=1)
    assert not report
    assert report.reused_fraction == 0.75
    text = str(report)
    assert text.startswith("1 of 2 donors donated, 120 B (75.0% of the bytes offered)")
    assert text.index("['unused']") < text.index("['used']")
    cells = [line.split("│")[-2].strip() for line in text.splitlines() if line.count("│") > 5]
    assert "no output of the step has its size of 40 bytes (outputs: 1 of 120 bytes)" in " ".join(cells)
    (mark,) = report.pending
    assert (mark.outcome, mark.step, mark.reason) == ("pending", None, "no step has read it yet")
    assert "1 pending" in text
    plain = json.loads(json.dumps(report.to_dict()))
    assert (plain["complete"], plain["donated_bytes"]) == (False, 120)
    assert [donor["reason_code"] for donor in plain["pending"]] == ["unread"]
    assert {donor["array"]: donor["outcome"] for donor in plain["donors"]} == {
        "f32[30]": "donated",
        "f32[10]": "unusable",
    }
    codes = {donor.name: donor.reason_code for donor in (*report.donors, *report.pending)}
    assert codes == {"['used']": None, "['unused']": Reason.NO_OUTPUT_OF_ITS_SIZE, "['pending']": Reason.UNREAD}
    assert json.loads(json.dumps(Reason.UNREAD)) == "unread" == str(Reason.UNREAD)
    _more = pending.sum()
    with donation_disabled():
        torch_xla.sync()
    assert donation_report(steps=1).donors[0].reason_code is Reason.DISABLED


def test_the_report_says_which_output_took_which_donor(make):
    """The numbers are those of the step's HLO."""
    first, second, kept = make(30), make(20), make(20)
    donate_buffer({"first": first, "second": second})
    _outs = [second * 2 + kept, first.sum(), first + 1]
    torch_xla.sync()
    report = donation_report(steps=1)
    (graph,) = [step["graph"] for step in _C.steps() if step["number"] == report.donors[0].step]
    module = hlo.parse(_C.graph_text(graph))
    aliases = {alias.parameter_number: alias.output_index[0] for alias in module.aliases}
    assert {donor.parameter: donor.output for donor in report.donors} == aliases
    for donor in report.donors:
        assert f"{donor.parameter} → {donor.output}" in str(report)


def compilations(count):
    return [step.compilations for step in donation_report(steps=count).steps]


def run(value, operations, mark=True):
    """A step with a graph for each number of operations."""
    if mark:
        donate_buffer(value)
    for _ in range(operations):
        value = value * value
    torch_xla.sync()
    return value


def test_each_step_counts_what_was_compiled_for_it(make):
    value = run(run(make(13), 1), 1)
    value = run(run(value, 1, mark=False), 2)
    assert compilations(4) == [1, 0, 1, 1]
    assert donation_report(steps=4).compilations == 3
    assert "torch_xla compiled 3 graphs, at 3 of 4 steps." in str(donation_report(steps=4))
    str(value.sum())  # a read belongs to the step before it
    assert compilations(4) == [1, 0, 1, 2]
    value = run(value, 2)
    assert compilations(3) == [1, 2, 0]


@pytest.mark.parametrize(
    ("options", "size"), [({}, 40), ({"pure": True}, 42), ({"backend": "openxla"}, 44)], ids=["lazy", "pure", "openxla"]
)
def test_a_compiled_functions_graph_counts_for_its_call(make, options, size):
    """Pure functions and torch.compile compile before the step begins. All three may share a graph of one size."""
    f = compile(lambda x: x * 3 - 2, donate_argnums=0, **options)
    f(f(make(size)))
    f(make(size + 1))
    assert compilations(3) == [1, 0, 1]


def test_a_refused_step_counts_its_graph(make):
    value = make(21)
    donate_buffer(value)
    with donation_disabled():
        value = value - 9
        torch_xla.sync()
    assert compilations(1) == [1]


def test_names_are_markup_neither_in_the_table_nor_in_a_notebook(make):
    """A notebook shows the text of the report."""
    names = {"[red]": make(5), "[/]": make(6), "<script>alert(1)</script>": make(3), "a&b": make(4)}
    donate_buffer(names)
    report = donation_report(steps=1)
    cancel_donation(names)
    text, page = str(report), report._repr_html_()
    assert "'[red]'" in text and "'[/]'" in text
    assert "<script>" not in page
    assert html.unescape(page) == f"<pre>{text}</pre>"
