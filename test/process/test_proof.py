"""The proof from the HLO: marks == donors before optimisation, aliases after it == pointers reused == the report."""

from __future__ import annotations

from pathlib import Path

import bare
import pytest
import torch_xla
from children import in_process, run_in_child
from helpers import make, pointer

from torch_xla_donate import donate_buffer, donation_report, hlo


def steps_of(dump_folder: Path) -> list[hlo.DumpedModule]:
    """The modules of the steps so far."""
    return [module for module in hlo.read_dump(dump_folder) if module.name.startswith("SyncTensorsGraph")]


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain parameters", "parameters in one tuple"])
@in_process(env=lambda wrapped: {"XLA_PARAMETER_WRAPPING_THREADSHOLD": "2"} if wrapped else {})
def test_marks_donors_aliases_pointers_and_report_agree(dump_folder, wrapped):
    used = [make(n) for n in (3, 5, 7)]
    unused = [make(11), make(13)]
    plain = [make(17)]
    before = {pointer(t) for t in used}
    donate_buffer({"used": used, "unused": unused})
    out = [t * 2 for t in used] + [sum(t.sum() for t in unused + plain)]
    with pytest.warns(UserWarning, match="not usable"):
        torch_xla.sync(wait=True)
    report = donation_report()
    reused = sorted(t.numel() for t in out[:3] if pointer(t) in before)
    donated = sorted(donor.shape[0] for donor in report.donors if donor.outcome == "donated")
    unusable = sorted(donor.shape[0] for donor in report.donors if donor.outcome == "unusable")

    (module,) = steps_of(dump_folder)
    asked = sorted(module.shape_of(donor).dims[0] for donor in module.donors)
    assert asked == [3, 5, 7, 11, 13]
    aliased = sorted(module.shape_of(alias).dims[0] for alias in module.aliases)
    left = sorted(module.shape_of(donor).dims[0] for donor in module.unused_donors)
    assert aliased == reused == donated == [3, 5, 7]
    assert left == unusable == [11, 13]
    assert module.aliased_bytes == report.donated_bytes == 4 * 15
    assert report.reused_fraction == pytest.approx(15 / 39)
    assert all((len(donor.parameter_index) == 1) is wrapped for donor in module.donors)


@in_process
def test_a_mark_concerns_the_graph_that_reads_it_and_no_other(dump_folder):
    t, other = make(3), make(5)
    donate_buffer(t)
    a = other + 1
    torch_xla.sync(wait=True)
    b = t + 1
    str(b)
    c = t + 2
    torch_xla.sync(wait=True)
    assert [len(module.donors) for module in steps_of(dump_folder)] == [0, 0, 1]
    assert (a.tolist(), b.tolist(), c.tolist()) == ([1, 2, 3, 4, 5], [1, 2, 3], [2, 3, 4])


@in_process
def test_what_torch_xla_donates_by_itself_is_left_alone(dump_folder):
    ours, theirs = make(3), make(5)
    donate_buffer(ours)
    out = ours + 1
    theirs.add_(1)
    torch_xla.sync(wait=True)
    (module,) = steps_of(dump_folder)
    assert sorted(module.shape_of(alias).dims[0] for alias in module.aliases) == [3, 5]
    assert [donor.shape[0] for donor in donation_report().donors] == [3]
    assert (out.tolist(), theirs.tolist()) == ([1, 2, 3], [1, 2, 3, 4, 5])


@pytest.mark.parametrize("program", [bare.train_three_steps, bare.write_through_views])
def test_no_mark_means_the_same_hlo_as_without_the_package(tmp_path, program):
    found = []
    for package in (True, False):
        folder = tmp_path / str(package)
        values = run_in_child(program, kwargs={"package": package}, dump=folder).value
        found.append((values, {path.name: path.read_bytes() for path in folder.glob("*optimizations.txt")}))
    assert found[0] == found[1] and len(found[0][1]) >= 4
