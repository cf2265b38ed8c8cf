"""docs/report_schema.json: it is what the classes of the report say, and reports are valid by it."""

from __future__ import annotations

import json

import fastjsonschema
import pytest
import report_schema
import torch
import torch_xla

from torch_xla_donate import DonationWarning, auto_donate, cancel_donation, donate_buffer, donation_report

VALIDATE = fastjsonschema.compile(json.loads(report_schema.FILE.read_text(encoding="utf-8")))


def plain(report):
    return json.loads(json.dumps(report.to_dict()))


def test_the_file_is_made_from_the_classes():
    assert report_schema.FILE.read_text(encoding="utf-8") == report_schema.text(), "run python test/report_schema.py"


def test_reports_of_all_outcomes_are_valid(make):
    used, unused, pending = make(30), make(10), make(4)
    donate_buffer({"used": used, "unused": unused, "pending": pending})
    out = used + unused.sum()
    with pytest.warns(DonationWarning):
        torch_xla.sync(wait=True)
    torch_xla.sync()
    report = donation_report(steps=2)
    assert {donor.outcome for donor in report.donors} == {"donated", "unusable"}
    assert len(report.pending) == 1
    VALIDATE(plain(report))
    cancel_donation(pending)
    assert out.shape == (30,)


def test_a_report_of_automatic_donation_is_valid(make):
    value = make(16)
    kept = value
    with auto_donate():
        for _ in range(3):
            value = value + 1
            torch_xla.sync()
    report = donation_report()
    assert any(donor.automatic for donor in report.donors)
    VALIDATE(plain(report))
    assert torch.equal(kept.cpu() + 3, value.cpu())


def test_another_document_is_not_valid(make):
    value = make(5)
    donate_buffer(value)
    out = value * 2
    torch_xla.sync()
    found = plain(donation_report(steps=1))
    for wrong in (
        {**found, "donors": [{**found["donors"][0], "reason_code": "because"}]},
        {**found, "donors": [{**found["donors"][0], "bytes": "20"}]},
        {**found, "more": 1},
        {name: value for name, value in found.items() if name != "steps"},
    ):
        with pytest.raises(fastjsonschema.JsonSchemaException):
            VALIDATE(wrong)
    assert out.shape == (5,)
