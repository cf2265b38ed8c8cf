"""Reading HLO: real dumps of torch_xla steps, and texts whose reading must end."""

from __future__ import annotations

import bare
import pytest
from children import in_process, run_in_child

from torch_xla_donate import hlo
from torch_xla_donate.hlo import DumpedModule, HloModule


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[DumpedModule, ...]:
    folder = tmp_path_factory.mktemp("steps")
    run_in_child(bare.donate_in_steps, dump=folder)
    return hlo.read_dump(folder)


def texts(module: DumpedModule) -> tuple[HloModule, HloModule]:
    assert module.before is not None and module.after is not None
    return module.before, module.after


def test_donors_of_every_dtype_are_read_with_their_bytes(steps: tuple[DumpedModule, ...]) -> None:
    (module,) = [module for module in steps if module.donors]
    shapes = {module.shape_of(donor).dtype: module.shape_of(donor).bytes for donor in module.donors}
    sizes = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "s32": 4, "s16": 2, "s8": 1}
    sizes |= {"u8": 1, "pred": 1, "c64": 8, "f8e4m3fn": 1}
    assert shapes == {name: 15 * size for name, size in sizes.items()}
    assert module.donated_bytes == sum(shapes.values())
    assert [str(module.shape_of(donor)) for donor in module.unused_donors] == ["f8e4m3fn[3,5]"]
    assert module.unused_donors == texts(module)[1].donors


def test_both_texts_of_a_module_are_paired(steps: tuple[DumpedModule, ...]) -> None:
    assert [module.module_id for module in steps] == list(range(len(steps)))
    for module in steps:
        before, after = texts(module)
        assert before.name == after.name == module.name
        assert before.name.startswith("SyncTensorsGraph.")
        assert (before.stage, after.stage) == ("before_optimizations", "after_optimizations")
        assert before.parameters == after.parameters and before.result == after.result
        assert before.num_partitions == before.replica_count == 1


def test_a_path_and_its_text_give_the_same_module(steps: tuple[DumpedModule, ...]) -> None:
    for module in steps:
        for text in texts(module):
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
