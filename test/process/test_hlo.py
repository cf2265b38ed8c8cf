"""Reading HLO: real dumps of torch_xla steps, texts whose reading must end, and the order and copies of donors."""

from __future__ import annotations

from pathlib import Path

import bare
import pytest
import torch
import torch_xla
from children import in_process, run_in_child
from helpers import pointer

from torch_xla_donate import donate_buffer, donation_report, hlo


def test_a_dump_is_read_with_its_donors_pairs_and_paths(tmp_path: Path) -> None:
    """Donors of each dtype have their bytes, both texts of a module are paired, and a path gives what its text does."""
    run_in_child(bare.donate_in_steps, dump=tmp_path)
    steps = hlo.read_dump(tmp_path)
    (module,) = [module for module in steps if module.donors]
    shapes = {module.shape_of(donor).dtype: module.shape_of(donor).bytes for donor in module.donors}
    sizes = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "s32": 4, "s16": 2, "s8": 1}
    sizes |= {"u8": 1, "pred": 1, "c64": 8, "f8e4m3fn": 1}
    assert shapes == {name: 15 * size for name, size in sizes.items()}
    assert module.donated_bytes == sum(shapes.values())
    assert [str(module.shape_of(donor)) for donor in module.unused_donors] == ["f8e4m3fn[3,5]"]
    assert module.after is not None and module.unused_donors == module.after.donors

    assert [module.module_id for module in steps] == list(range(len(steps)))
    for module in steps:
        before, after = module.before, module.after
        assert before is not None and after is not None
        assert before.name == after.name == module.name
        assert before.name.startswith("SyncTensorsGraph.")
        assert (before.stage, after.stage) == ("before_optimizations", "after_optimizations")
        assert before.parameters == after.parameters and before.result == after.result
        assert before.num_partitions == before.replica_count == 1
        for text in (before, after):
            assert text.path is not None
            assert hlo.parse(text.path) == hlo.parse(str(text.path)) == text
            read = hlo.parse(text.path.read_text())
            assert (read.path, read.module_id, read.stage) == (None, None, None)
            assert (read.parameters, read.result) == (text.parameters, text.result)
            assert (read.donors, read.aliases) == (text.donors, text.aliases)


BROKEN = ['\\"', '"', "(", "{", "/*", "//", "[", " ", "f32[", "a=1,", '"\\']
STARTS = ["HloModule m, a=", 'HloModule m, a={"', "HloModule m, entry_computation_layout={("]


@in_process
def test_a_broken_text_of_a_megabyte_is_refused() -> None:
    """A pattern that goes back would take hours; the child's guard ends it."""
    for part in BROKEN:
        for start in STARTS:
            with pytest.raises(ValueError):
                hlo.parse(start + part * (1_000_000 // len(part)))


@in_process
def test_a_pair_is_kept_where_other_outputs_share_a_buffer():
    """As after updates in place whose values are kept by detach(): the executor has several outputs of one id."""
    counter, source, other = (torch.arange(float(size)).to("xla") for size in (7, 5, 5))
    torch_xla.sync(wait=True)
    kept = []
    for _ in range(3):
        counter.add_(1)
        kept.append(counter.detach())
    counter.add_(1)
    result = source * 2
    places = pointer(source), pointer(other)
    other.add_(1)
    donate_buffer(source, into=result)
    torch_xla.sync(wait=True)
    (donor,) = donation_report(steps=1).donors
    assert donor.outcome == "donated" and donor.into_kept
    assert (pointer(result), pointer(other)) == places


@in_process(env={"TORCH_XLA_DONATE_KEEP_ORDER": "1"})
def test_a_kept_order_leaves_the_graph_and_says_what_crosses(dump_folder):
    """A pair that crosses is copied: values stay right, and the tensor moves."""
    w = torch.ones(4, 6).to("xla")
    torch_xla.sync(wait=True)
    place = pointer(w)
    kept = w.sum() + torch.zeros(24, device="xla")
    new = w + 1
    donate_buffer(w)
    torch_xla.sync(wait=True)
    (donor,) = donation_report(steps=1).donors
    assert donor.outcome == "donated" and donor.crossed
    assert pointer(kept) == place != pointer(new)
    assert (kept.unique().tolist(), new.unique().tolist()) == ([24.0], [2.0])
    (graph,) = [module for module in hlo.read_dump(dump_folder) if module.before and module.before.donors]
    assert [shape.dims for shape in graph.before.result.elements] == [(24,), (4, 6)]
