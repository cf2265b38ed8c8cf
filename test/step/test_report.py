"""donation_report: its fields, its text, and the reasons it gives."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser

import pytest
import torch
import torch_xla
from children import in_process

from torch_xla_donate import (
    _C,
    DonationError,
    DonationWarning,
    Reason,
    _config,
    cancel_donation,
    compile,
    configure,
    donate_buffer,
    donation_disabled,
    donation_report,
    hlo,
)
from torch_xla_donate._report.explain import explain


def test_a_report_of_a_step_in_which_all_was_used(make):
    t = make(8, 2)
    donate_buffer({"w": t})
    out = t + 1
    torch_xla.sync()
    report = donation_report(steps=1)
    (donor,) = report.donors
    assert (donor.name, donor.shape, donor.dtype, donor.array, donor.bytes) == ("['w']", (8, 2), "f32", "f32[8,2]", 64)
    assert (donor.outcome, donor.reason, donor.device) == ("donated", "", "CPU:0")
    assert donor.where.startswith(__file__)
    assert report
    assert report.donated_bytes == 64
    assert report.reused_fraction == 1.0
    assert out.shape == (8, 2)


def test_a_report_without_donors_is_false(monkeypatch):
    monkeypatch.setattr(_C, "steps", list)
    monkeypatch.setattr(_C, "auto_held", list)
    report = donation_report()
    assert not report
    assert (report.donors, report.donated_bytes, report.reused_fraction) == ((), 0, 0.0)
    assert str(report) == "No step has had a donor yet."


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
def test_a_partly_used_step_is_false_and_weighs_by_bytes(make):
    used, unused = make(30), make(10)
    donate_buffer([used, unused])
    out = used + unused.sum()
    torch_xla.sync()
    report = donation_report(steps=1)
    assert not report
    assert report.reused_fraction == 0.75
    assert out.shape == (30,)


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
def test_the_text_shows_what_went_wrong_first(make):
    used, unused = make(30), make(10)
    donate_buffer({"used": used, "unused": unused})
    out = used + unused.sum()
    torch_xla.sync()
    text = str(donation_report(steps=1))
    assert text.startswith("1 of 2 donors donated, 120 B (75.0% of the bytes offered)")
    assert text.index("['unused']") < text.index("['used']")
    assert (
        "no output of the step has its size of 40 bytes (outputs: 1 of 120 bytes)"
        in " ".join(text.replace("│", " ").split())
        or "no output of the step has its size of 40 bytes" in text
    )
    assert all(line == line.rstrip() for line in text.splitlines())
    assert out.shape == (30,)


def test_the_dictionary_is_plain_data(make):
    t = make(4)
    donate_buffer(t)
    out = t + 1
    torch_xla.sync()
    data = json.loads(json.dumps(donation_report(steps=1).to_dict()))
    assert data["donated_bytes"] == 16
    assert data["reused_fraction"] == 1.0
    assert data["donors"][0]["outcome"] == "donated"
    assert data["donors"][0]["shape"] == [4]
    assert out.shape == (4,)


def test_pending_marks_are_listed_apart(make):
    t = make(4)
    donate_buffer(t)
    report = donation_report(steps=1)
    (pending,) = report.pending
    assert (pending.outcome, pending.step, pending.reason) == ("pending", None, "no step has read it yet")
    assert "1 pending" in str(report)
    cancel_donation(t)


def test_steps_are_kept_for_the_last_eight(make):
    value = make(16)
    for _ in range(12):
        donate_buffer(value)
        value = value + 1
        torch_xla.sync()
    report = donation_report()
    steps = [donor.step for donor in report.donors]
    assert len(steps) == 8
    assert steps == sorted(steps)
    assert [donor.step for donor in donation_report(steps=2).donors] == steps[-2:]
    for steps in ("2", True, 1.0):
        with pytest.raises(TypeError, match="steps is of type (str|bool|float), not an int"):
            donation_report(steps=steps)
    with pytest.raises(ValueError, match="steps is 0. Pass 1 or more, or None"):
        donation_report(steps=0)


def test_many_donors_are_cut_in_the_text_and_not_in_the_data(make):
    tensors = [make(3) for _ in range(50)]
    donate_buffer(tensors)
    out = [t + 1 for t in tensors]
    torch_xla.sync()
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
    code, text = explain(donor(donors[0]), outputs, donors)
    assert code is expected
    assert text.startswith(reason or "every 8-byte output already reuses another input")


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
def test_refused_donors_do_not_compete(make):
    updated, lost, shared = make(6), make(6), make(6)
    holder = torch.empty(6, device="xla")
    holder.copy_(shared)
    torch_xla.sync()
    updated.add_(1)
    total = lost.sum() + shared.sum()
    donate_buffer([lost, shared])
    torch_xla.sync(wait=True)
    reasons = {donor.name: donor.reason_code for donor in donation_report(steps=1).donors}
    assert reasons == {"[0]": Reason.OUTPUTS_TAKEN, "[1]": Reason.HELD_BY_OTHERS}
    assert total.shape == ()


def test_names_in_the_table_are_not_markup(make):
    tree = {"[red]": make(5), "[/]": make(6)}
    donate_buffer(tree)
    shown = str(donation_report(steps=1))
    cancel_donation(tree)
    assert "'[red]'" in shown
    assert "'[/]'" in shown


def test_the_reason_names_shardings_that_keep_the_sizes_apart():
    sharded = donor(32, "f32[8]{0} sharding={devices=[4]0,1,2,3}")
    outputs = ["f32[8]{0} sharding={replicated}", "f32[] sharding={replicated}"]
    assert explain(sharded, outputs, [32]) == (
        Reason.SHARDED_DIFFERENTLY,
        "an output has its size of 32 bytes, but not per device: the donor, sharded {devices=[4]0,1,2,3}, takes "
        "8 bytes on each device, and the output f32[8], sharded {replicated}, takes 32; shard donor and output alike",
    )


def test_a_pending_mark_is_predicted_on_request(make):
    used, rival, unused, unread, shared = make(6), make(6), make(5), make(4), make(7)
    holder = torch.empty(7, device="xla")
    holder.copy_(shared)
    torch_xla.sync()
    out = [used + 1 + rival.sum(), unused.sum(), shared + 1]
    donate_buffer({"used": used, "rival": rival, "unused": unused, "unread": unread, "shared": shared})

    def predictions():
        return {mark.name[2:-2]: (mark.prediction, mark.reason) for mark in donation_report(predict=True).pending}

    assert {mark.prediction for mark in donation_report().pending} == {None}
    found = predictions()
    assert found["unread"] == (None, "no step has read it yet; no pending work reads it")
    assert sorted(found[name][0] for name in ("used", "rival")) == ["donated", "unusable"]
    assert found["shared"][0] == "unusable"
    assert "another live tensor, which was not donated" in found["shared"][1]
    assert found["unused"][1].startswith("no step has read it yet; the next one will not use it: no output of the step")
    with donation_disabled():
        assert predictions()["used"][1].endswith("will not use it: donation is disabled (donation_disabled())")
    # To look has changed nothing, and the step does what was predicted.
    cancel_donation(unread)
    with pytest.warns(DonationWarning):
        torch_xla.sync(wait=True)
    after = {donor.name[2:-2]: donor.outcome for donor in donation_report(steps=1).donors}
    assert after == {name: found[name][0] for name in after}
    assert len(out) == 3
    assert len(holder) == 7


@pytest.mark.parametrize("wished", [0, 1])
def test_the_prediction_knows_the_pairs_that_into_asks_for(make, wished):
    tensors = [make(9), make(9)]
    out = tensors[0] + tensors[1]
    donate_buffer(tensors, into=[out if i == wished else None for i in range(2)])
    predicted = [mark.prediction for mark in sorted(donation_report(predict=True).pending, key=lambda mark: mark.name)]
    assert predicted[wished] == "donated"
    with pytest.warns(DonationWarning):
        torch_xla.sync(wait=True)
    assert [d.outcome for d in sorted(donation_report(steps=1).donors, key=lambda d: d.name)] == predicted


@in_process(env={"XLA_DISABLE_FUNCTIONALIZATION": "1"})
def test_work_on_views_that_cannot_be_seen_is_not_predicted():
    t, other = torch.ones(4).to("xla"), torch.ones(5).to("xla")
    torch_xla.sync(wait=True)
    out, unseen = other + 1, t + 1
    view = unseen[2:]
    donate_buffer([t, other])
    reason = "no step has read it yet; functionalization is off, so the pending work of views is not known"
    predicted = [(mark.prediction, mark.reason) for mark in donation_report(predict=True).pending]
    assert predicted == [("unknown", reason)] * 2
    torch_xla.sync(wait=True)
    assert donation_report()
    assert view.tolist() == [2, 2]
    assert len(out) == 5


@in_process
def test_an_error_inside_a_hook_is_in_the_report():
    for _ in range(2):
        _C.note_error("out of memory")
    report = donation_report()
    assert report.errors == {"out of memory": 2} == report.to_dict()["errors"]
    assert "A hook failed 2 times and the step went on without it: out of memory." in str(report)


# --- Codes, numbers and compilations ---


def test_donors_have_codes(make):
    used, unused, pending = make(30), make(10), make(4)
    donate_buffer({"used": used, "unused": unused, "pending": pending}, strict="off")
    out = used + unused.sum()
    torch_xla.sync()
    report = donation_report(steps=1)
    codes = {donor.name: donor.reason_code for donor in (*report.donors, *report.pending)}
    assert codes == {
        "['used']": None,
        "['unused']": Reason.NO_OUTPUT_OF_ITS_SIZE,
        "['pending']": Reason.UNREAD,
    }
    assert json.loads(json.dumps(Reason.UNREAD)) == "unread" == str(Reason.UNREAD)
    more = pending.sum()
    (mark,) = donation_report(predict=True).pending
    assert mark.reason_code is Reason.NO_OUTPUT_OF_ITS_SIZE
    with donation_disabled():
        assert donation_report(predict=True).pending[0].reason_code is Reason.DISABLED
        torch_xla.sync()
    assert donation_report(steps=1).donors[0].reason_code is Reason.DISABLED
    assert (out.shape, more.shape) == ((30,), ())


@pytest.mark.parametrize("options", [{}, {"pure": True}, {"backend": "openxla"}], ids=["lazy", "pure", "openxla"])
def test_an_unread_argument_has_its_code(make, options):
    f = compile(lambda x, y: y * 2, donate_argnums=0, strict="off", **options)
    result = f(make(3), make(3))
    assert donation_report(steps=1).donors[-1].reason_code in (Reason.NOT_READ, Reason.NO_GRAPH)
    assert result.tolist() == [0, 2, 4]


def test_the_report_says_which_output_took_which_donor(make):
    """The numbers are those of the step's HLO."""
    first, second, kept = make(30), make(20), make(20)
    donate_buffer({"first": first, "second": second})
    outs = [second * 2 + kept, first.sum(), first + 1]
    torch_xla.sync()
    report = donation_report(steps=1)
    aliases = {alias.parameter_number: alias.output_index[0] for alias in hlo.parse(graph_of(report)).aliases}
    assert {donor.parameter: donor.output for donor in report.donors} == aliases
    for donor in report.donors:
        assert f"{donor.parameter} → {donor.output}" in str(report)
        assert f"{donor.parameter} → {donor.output}" in report._repr_html_()
    assert len(outs) == 3


def graph_of(report):
    (step,) = [step for step in _C.steps() if step["number"] == report.donors[0].step]
    return _C.graph_text(step["graph"])


def test_compilations_are_counted(make):
    value = make(17)
    for size in (17, 18, 18, 18):
        value = make(size)
        donate_buffer(value)
        value = value + 3
        torch_xla.sync()
    assert [step.compilations for step in donation_report(steps=4).steps] == [1, 1, 0, 0]
    assert donation_report(steps=4).compilations == 2
    assert "torch_xla compiled 2 graphs, at 2 of 4 steps." in str(donation_report(steps=4))
    assert donation_report(steps=2).compilations == 0
    other = value * 5 - 1
    torch_xla.sync()
    report = donation_report(steps=2)
    assert [(step.number is None, step.compilations) for step in report.steps] == [(False, 1), (True, 0)]
    assert other.shape == (18,)


# --- Settings ---


@pytest.fixture
def restored():
    before = configure()
    yield before
    configure(**before)


def test_more_or_fewer_steps_are_kept(make, restored):
    assert restored == {"kept_steps": 8, "warn_min_bytes": 0}
    assert configure(kept_steps=12) == restored
    value = make(16)
    for _ in range(14):
        donate_buffer(value)
        value = value + 1
        torch_xla.sync()
    assert len(donation_report().steps) == 12
    assert len(donation_report(steps=50).steps) == 12
    configure(kept_steps=3)
    assert len(donation_report().steps) == 3
    for name in ("kept_steps", "warn_min_bytes"):
        for wrong, error in [(-1, ValueError), ("8", TypeError), (True, TypeError)]:
            with pytest.raises(error, match=f"{name} is "):
                configure(**{name: wrong})
    assert configure()["kept_steps"] == 3


def test_small_donors_neither_warn_nor_raise(make, restored):
    configure(warn_min_bytes=40)
    for strict in (False, True):
        small, large = make(9), make(10)
        donate_buffer(small, strict=strict)
        total = small.sum()
        torch_xla.sync(wait=True)
        assert donation_report(steps=1).donors[0].outcome == "unusable"
        donate_buffer([small, large], strict=strict)
        total = small.sum() + large.sum()
        with pytest.raises(DonationError) if strict else pytest.warns(DonationWarning) as caught:
            torch_xla.sync(wait=True)
        text = str(caught.value) if strict else str(caught[0].message)
        assert "f32[10]" in text
        assert "f32[9]" not in text
    assert total.item() == 36 + 45


@in_process(env={"TORCH_XLA_DONATE_KEPT_STEPS": "2", "TORCH_XLA_DONATE_WARN_MIN_BYTES": "1000"})
def test_the_environment_has_the_settings():
    assert configure() == {"kept_steps": 2, "warn_min_bytes": 1000}


def test_settings_of_the_environment_are_numbers(monkeypatch):
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv("TORCH_XLA_DONATE_KEPT_STEPS", wrong)
        with pytest.raises(ValueError, match=f"TORCH_XLA_DONATE_KEPT_STEPS='{wrong}' is not a whole number of 1 or"):
            _config.kept_steps()
    monkeypatch.setenv("TORCH_XLA_DONATE_KEPT_STEPS", "")
    assert _config.kept_steps() == 8


# --- HTML ---


class _Tags(HTMLParser):
    """Every tag is closed, and none loads anything."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attributes):
        assert {name for name, _ in attributes} <= {"style"}
        assert not any("url(" in value for _, value in attributes)
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_a_notebook_shows_the_report_as_html(make):
    used, unused = make(30), make(10)
    donate_buffer({"<script>alert(1)</script>": used, "a&b": unused}, strict="off")
    out = used + unused.sum()
    torch_xla.sync()
    found = donation_report(steps=1)
    page = found._repr_html_()
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen == {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert "<script>" not in page
    text = "".join(tags.text)
    assert "['<script>alert(1)</script>'] (test_report.py:" in text
    assert text.startswith("1 of 2 donors donated, 120 B (75.0% of the bytes offered)")
    assert "no output of the step has its size of 40 bytes" in text
    assert out.shape == (30,)


def test_html_is_cut_after_a_thousand_donors(make):
    tensors = [make(3) for _ in range(5)]
    donate_buffer(tensors)
    out = [t + 1 for t in tensors]
    torch_xla.sync()
    report = donation_report(steps=1)
    many = dataclasses.replace(report, donors=report.donors * 300)
    assert many._repr_html_().count("<tr>") == 1001
    assert "... and 500 more; see .to_dict()" in many._repr_html_()
    assert dataclasses.replace(report, donors=())._repr_html_().startswith("<div><p")
    assert len(out) == 5
