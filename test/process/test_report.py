"""donation_report in a fresh process: what it counts before the first donor, and errors of hooks."""

from __future__ import annotations

import torch_xla
import torch_xla.debug.metrics as metrics
from children import in_process
from helpers import make

from torch_xla_donate import _C, donate_buffer, donation_report


@in_process
def test_an_error_inside_a_hook_is_in_the_report():
    for _ in range(2):
        _C.note_error("out of memory")
    report = donation_report()
    assert report.errors == {"out of memory": 2} == report.to_dict()["errors"]
    assert "A hook failed 2 times and the step went on without it: out of memory." in str(report)


@in_process
def test_the_first_step_with_donors_counts_those_before():
    value, compiled = make(23), []
    for operations, mark in ((1, False), (2, True), (2, True), (3, False)):
        if mark:
            donate_buffer(value)
        for _ in range(operations):
            value = value * value
        torch_xla.sync()
        compiled.append([step.compilations for step in donation_report().steps])
    assert compiled == [[], [2], [2, 0], [2, 0, 1]]
    assert metrics.counter_value("UncachedCompile") == 3
    assert value.shape == (23,)
