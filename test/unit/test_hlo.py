"""Reading HLO: real dumps of torch_xla steps, the corners of the syntax, and random texts."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import bare
import pytest
from children import in_process, run_in_child
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_donate import hlo
from torch_xla_donate.hlo import Alias, BufferDonor, DumpedModule, HloModule, HloShape, parser


@pytest.fixture(scope="session")
def steps_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    run_in_child(bare.donate_in_steps, dump=folder)
    return folder


@pytest.fixture(scope="session")
def steps(steps_folder: Path) -> tuple[DumpedModule, ...]:
    return hlo.read_dump(steps_folder)


@pytest.fixture(scope="session")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> DumpedModule:
    folder = tmp_path_factory.mktemp("wrapped")
    run_in_child(bare.donate_wrapped, env={"XLA_PARAMETER_WRAPPING_THREADSHOLD": "2"}, dump=folder)
    (module,) = hlo.read_dump(folder)
    return module


@pytest.fixture(scope="session")
def spmd(tmp_path_factory: pytest.TempPathFactory) -> DumpedModule:
    folder = tmp_path_factory.mktemp("spmd")
    run_in_child(bare.donate_sharded, devices=4, dump=folder)
    (module,) = hlo.read_dump(folder)
    return module


def texts(module: DumpedModule) -> tuple[HloModule, HloModule]:
    assert module.before is not None and module.after is not None
    return module.before, module.after


def with_parameter(dump: tuple[DumpedModule, ...], shape: str) -> DumpedModule:
    """The last module that has a donor of this shape."""
    found = [m for m in dump if any(str(m.shape_of(donor)) == shape for donor in m.donors)]
    return found[-1]


# Real dumps


def test_donors_of_every_dtype_are_read_with_their_bytes(steps: tuple[DumpedModule, ...]) -> None:
    module = with_parameter(steps, "bf16[3,5]")
    shapes = {module.shape_of(donor).dtype: module.shape_of(donor).bytes for donor in module.donors}
    sizes = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "s32": 4, "s16": 2, "s8": 1}
    sizes |= {"u8": 1, "pred": 1, "c64": 8, "f8e4m3fn": 1}
    assert shapes == {name: 15 * size for name, size in sizes.items()}
    assert module.donated_bytes == sum(shapes.values())


def test_a_donor_without_an_output_of_its_bytes_is_unused(steps: tuple[DumpedModule, ...]) -> None:
    module = with_parameter(steps, "bf16[3,5]")
    assert [str(module.shape_of(donor)) for donor in module.unused_donors] == ["f8e4m3fn[3,5]"]
    assert module.donated_bytes - module.aliased_bytes == 15

    module = with_parameter(steps, "f32[7,3]")
    before, after = texts(module)
    assert module.donors == before.donors == after.donors == module.unused_donors
    assert module.aliases == ()
    assert (module.donated_bytes, module.aliased_bytes) == (84, 0)


def test_one_of_two_donors_is_used_for_one_output(steps: tuple[DumpedModule, ...]) -> None:
    module = with_parameter(steps, "f32[11,2]")
    assert len(module.donors) == 2
    (alias,) = module.aliases
    assert alias.output_index == (0,) and alias.kind == "may"
    assert module.unused_donors == tuple(d for d in module.donors if d != alias.donor)


def test_an_optimizer_step_aliases_its_parameter_and_state(steps: tuple[DumpedModule, ...]) -> None:
    module = with_parameter(steps, "f32[13,4]")
    aliased = [str(module.shape_of(alias)) for alias in module.aliases]
    assert aliased.count("f32[13,4]") == 2
    assert module.unused_donors == ()


def test_both_texts_of_a_module_are_paired(steps: tuple[DumpedModule, ...]) -> None:
    assert [module.module_id for module in steps] == list(range(len(steps)))
    for module in steps:
        before, after = texts(module)
        assert before.name == after.name == module.name
        assert before.name.startswith("SyncTensorsGraph.")
        assert (before.stage, after.stage) == ("before_optimizations", "after_optimizations")
        assert before.parameters == after.parameters and before.result == after.result
        assert before.num_partitions == before.replica_count == 1


def test_the_entry_computation_has_the_modules_name(steps: tuple[DumpedModule, ...]) -> None:
    before, after = texts(steps[0])
    assert before.entry == after.entry == steps[0].name


def test_dump_files_are_named_as_the_docstring_says(steps_folder: Path, steps: tuple[DumpedModule, ...]) -> None:
    before, after = texts(steps[1])
    assert before.path == steps_folder / f"module_0001.{steps[1].name}.before_optimizations.txt"
    assert after.path == steps_folder / f"module_0001.{steps[1].name}.cpu_after_optimizations.txt"
    beside = f"module_0001.{steps[1].name}.cpu_after_optimizations-buffer-assignment.txt"
    assert (steps_folder / beside).exists()


def test_a_path_and_its_text_give_the_same_module(steps: tuple[DumpedModule, ...]) -> None:
    for module in steps:
        for text in texts(module):
            assert text.path is not None
            assert hlo.parse(text.path) == hlo.parse(str(text.path)) == text
            read = hlo.parse(text.path.read_text())
            assert (read.path, read.module_id, read.stage) == (None, None, None)
            assert (read.parameters, read.result) == (text.parameters, text.result)
            assert (read.donors, read.aliases) == (text.donors, text.aliases)
            assert read.entry == text.entry


def test_the_signature_of_an_entry_computation_beats_the_headers(
    steps: tuple[DumpedModule, ...], wrapped: DumpedModule, spmd: DumpedModule
) -> None:
    for module in (*steps, wrapped, spmd):
        for text in texts(module):
            assert text.path is not None
            header, body = text.path.read_text().split("\n", 1)
            start = header.index(", entry_computation_layout=")
            bare = hlo.parse(f"{header[:start]}\n{body}")
            assert (bare.parameters, bare.result) == (text.parameters, text.result)
            assert (bare.donors, bare.aliases) == (text.donors, text.aliases)


def test_wrapped_parameters_resolve_to_the_leaves_of_the_tuple(wrapped: DumpedModule) -> None:
    before, after = texts(wrapped)
    assert len(before.parameters) == 1 and before.parameters[0].is_tuple
    assert [str(donor) for donor in wrapped.donors] == [
        "(0, {1})",
        "(0, {3})",
        "(0, {5})",
        "(0, {7})",
    ]
    expected = ["f32[3,1]", "f32[3,3]", "f32[3,5]", "f32[3,7]"]
    assert [str(wrapped.shape_of(donor)) for donor in wrapped.donors] == expected
    assert [str(after.leaves[0, donor.parameter_index]) for donor in wrapped.donors] == expected
    assert [alias.donor for alias in wrapped.aliases] == list(wrapped.donors)
    assert wrapped.donated_bytes == wrapped.aliased_bytes == 4 * 3 * (1 + 3 + 5 + 7)
    assert len(after.leaves) == 8


def test_shapes_of_an_spmd_module_are_those_of_one_device(spmd: DumpedModule) -> None:
    before, after = texts(spmd)
    assert before.num_partitions == after.num_partitions == 4
    assert [str(before.shape_of(d)) for d in spmd.donors] == ["f32[8,4]", "f32[8,4]", "f32[6,3]"]
    assert [str(spmd.shape_of(d)) for d in spmd.donors] == ["f32[2,4]", "f32[8,4]", "f32[6,3]"]
    assert [str(spmd.shape_of(d)) for d in spmd.unused_donors] == ["f32[6,3]"]
    assert before.donated_bytes == 128 + 128 + 72
    assert spmd.donated_bytes == 32 + 128 + 72
    assert spmd.aliased_bytes == after.aliased_bytes == 32 + 128
    assert after.entry == f"{spmd.name}_spmd"


# Folders


HEADER = "HloModule {}, {}entry_computation_layout={{(f32[4]{{0}})->(f32[4]{{0}})}}\n\nENTRY %main"
ASKED = "buffer_donor={ (0, {}) }, "
GOT = "input_output_alias={ {0}: (0, {}, may-alias) }, "


def test_files_of_other_backends_and_with_timestamps_are_paired(tmp_path: Path) -> None:
    long_name = "m" * 240
    files = {
        "module_0000.f.before_optimizations.txt": ("f", ASKED),
        "module_0000.f.sm_8.0_gpu_after_optimizations.txt": ("f", GOT),
        "module_0000.g.before_optimizations.txt": ("g", ASKED),
        "module_10001.f.before_optimizations.txt": ("f", ""),
        "module_10001.f.after_optimizations.txt": ("f", ""),
        "1700000000000000.module_0000.f.before_optimizations.txt": ("f", ASKED),
        "1700000000000000.module_0000.f.cpu_after_optimizations.txt": ("f", ""),
        "module_0002.before_optimizations.txt": (long_name, ASKED),
        "module_0002.cpu_after_optimizations.txt": (long_name, GOT),
        "module_0000.f.0003.pipeline.after_dce.before_cse.txt": ("f", ""),
        "module_0000.f.cpu_after_optimizations-buffer-assignment.txt": ("f", ""),
    }
    for file, (name, attributes) in files.items():
        (tmp_path / file).write_text(HEADER.format(name, attributes))
    (tmp_path / "module_0000.f.debug_options").write_text("not HLO")
    read = [
        (m.module_id, m.name[:2], len(m.donors), len(m.aliases), m.after is not None) for m in hlo.read_dump(tmp_path)
    ]
    assert read == [
        (0, "f", 1, 1, True),
        (0, "g", 1, 0, False),
        (2, "mm", 1, 1, True),
        (10001, "f", 0, 0, True),
        (0, "f", 1, 0, True),
    ]
    passes = hlo.parse(tmp_path / "module_0000.f.0003.pipeline.after_dce.before_cse.txt")
    assert passes.stage == "0003.pipeline.after_dce.before_cse"


def test_a_module_that_did_not_compile_leaves_its_donors_unused(tmp_path: Path) -> None:
    (tmp_path / "module_0000.f.before_optimizations.txt").write_text(HEADER.format("f", ASKED))
    (module,) = hlo.read_dump(str(tmp_path))
    assert module.after is None
    assert module.donors == module.unused_donors == (BufferDonor(0),)
    assert (module.aliases, module.donated_bytes, module.aliased_bytes) == ((), 16, 0)


def test_what_was_asked_is_told_from_the_optimised_text_alone() -> None:
    after = hlo.parse(
        "HloModule m, input_output_alias={ {}: (1, {}, must-alias) }, buffer_donor={ (0, {}) },"
        " entry_computation_layout={(f32[2], f32[4])->f32[4]}"
    )
    module = DumpedModule(before=None, after=after)
    assert module.donors == (BufferDonor(0), BufferDonor(1))
    assert module.unused_donors == (BufferDonor(0),)
    assert (module.donated_bytes, module.aliased_bytes) == (24, 16)


def test_a_pair_without_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="has neither before nor after. Give it at least one"):
        _ = DumpedModule(None, None).name


def test_a_folder_without_hlo_names_the_flags_to_set(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("HloModule")
    with pytest.raises(FileNotFoundError) as error:
        hlo.read_dump(tmp_path)
    assert str(error.value) == (
        f"folder {tmp_path} has 1 files, but no module_*.before_optimizations.txt and no"
        " module_*after_optimizations.txt. Set"
        ' XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text" before torch_xla starts.'
    )


def test_a_missing_folder_names_the_flags_to_set(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error:
        hlo.read_dump(tmp_path / "gone")
    assert str(error.value) == (
        f"folder {tmp_path / 'gone'} does not exist. Set"
        ' XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text" before torch_xla starts.'
    )


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "module_0000.f.before_optimizations.txt"
    file.write_text("HloModule f, buffer_donor={ (0")
    with pytest.raises(ValueError) as error:
        hlo.read_dump(tmp_path)
    expected = f"{file}: found the end of the text at offset 30, expected ','"
    assert str(error.value) == expected


def test_a_file_is_read_no_further_than_its_header(tmp_path: Path) -> None:
    file = tmp_path / "module_0000.f.before_optimizations.txt"
    with open(file, "wb") as out:
        out.write(HEADER.format("f", ASKED).split("ENTRY")[0].encode())
        out.seek(1 << 40)  # A hole: to read a terabyte would not end.
        out.write(b"\n")
    assert hlo.read_dump(tmp_path)[0].donors == (BufferDonor(0),)


# Syntax


def header(signature: str, *attributes: str) -> str:
    return ", ".join(("HloModule m", *attributes, f"entry_computation_layout={{{signature}}}"))


def test_a_tpus_layouts_are_kept_as_text_and_not_compared() -> None:
    layouts = ["{1,0:T(8,128)(2,1)S(1)}", "{1,0:T(8,128)(2,1)}", "{0,1:D(D,C)L(16)#(u32)SC(0:1,2)}"]
    arrays = ", ".join(f"bf16[8,4]{layout}" for layout in layouts)
    module = hlo.parse(header(f"({arrays}, bf16[8,4], u32[]{{:T(256)}})->f32[]{{:T(256)}}"))
    assert [shape.layout for shape in module.parameters] == [*layouts, "", "{:T(256)}"]
    assert module.parameters[:4] == (HloShape("bf16", (8, 4)),) * 4
    assert len(set(module.parameters[:4])) == 1
    assert str(module.parameters[0]) == "bf16[8,4]"
    assert module.results == (HloShape("f32"),)


def test_a_layout_with_braces_inside_is_one_layout() -> None:
    layout = "{1,0:T(8,128)P((s32[3]{0}, s8[2]{0:T(4)}))}"
    module = hlo.parse(header(f"(f32[8,4]{layout}, s32[])->f32[]"))
    assert [shape.layout for shape in module.parameters] == [layout, ""]


def test_index_comments_are_skipped_wherever_they_stand() -> None:
    module = hlo.parse(
        "/* made by hand */ // twice\nHloModule /*a, b*/ m, buffer_donor={ /*{*/ (1, {}) }, "
        "entry_computation_layout={(f32[1], /*index=5*/f32[2])->(f32[1], /*index=5*/f32[2])}"
    )
    assert module.donors == (BufferDonor(1),)
    assert module.parameters == module.results == (HloShape("f32", (1,)), HloShape("f32", (2,)))


def test_other_attributes_are_skipped_with_braces_and_strings() -> None:
    module = hlo.parse(
        r"HloModule jit__f.1, is_scheduled=true, alias_passthrough_params=true,"
        r' frontend_attributes={a="}, buffer_donor={ (7, {}) }",b="\"{",c="\\"},'
        r' schedule="x\"y, z", devices={{0,1},{2,3}}, groups=[2,4]<=[8],'
        " entry_computation_layout={(f32[2])->f32[2]},"
        " allow_spmd_sharding_propagation_to_output={true,false},"
        " replica_count=2, num_partitions=16\n\nnot, read=further"
    )
    assert module.name == "jit__f.1"
    assert (module.donors, module.aliases) == ((), ())
    assert (module.replica_count, module.num_partitions) == (2, 16)


def test_nested_tuples_and_every_kind_of_alias_are_read() -> None:
    module = hlo.parse(
        header(
            "((f32[2], (s32[], pred[3])), f32[2], ())->((f32[2], s32[]), pred[3])",
            "input_output_alias={ {0,0}: (0, {0}, may-alias), {0, 1}: (0, {1,0}, must-alias), {1}: (0, {1, 1}) }",
            "buffer_donor={ (1, {}) }",
        )
    )
    assert module.aliases == (
        Alias((0, 0), 0, (0,), "may"),
        Alias((0, 1), 0, (1, 0), "must"),
        Alias((1,), 0, (1, 1), "may"),
    )
    assert str(module.aliases[1]) == "{0,1}: (0, {1,0}, must-alias)"
    assert module.aliased_bytes == 8 + 4 + 3
    assert {key: str(shape) for key, shape in module.leaves.items()} == {
        (0, (0,)): "f32[2]",
        (0, (1, 0)): "s32[]",
        (0, (1, 1)): "pred[3]",
        (1, ()): "f32[2]",
    }
    assert str(module.parameters[0]) == "(f32[2], (s32[], pred[3]))"


def test_a_header_over_several_lines_is_read_from_a_file_too(tmp_path: Path) -> None:
    text = header("(\n  f32[2])\n  ->\n  f32[2]", "\n  buffer_donor={\n (0, {})\n}")
    file = tmp_path / "wrapped.txt"
    file.write_text(text)
    for module in (hlo.parse(text), hlo.parse(file)):
        assert module.donors == (BufferDonor(0),)
        assert module.entry is None
        assert (module.module_id, module.stage) == (None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("pred[3,5]", 15),
        ("f32[]", 4),
        ("f32[0,7]", 0),
        ("c128[2]", 32),
        ("s4[3]", 3),
        ("s4[3]{0:E(4)}", 2),
        ("u4[8]{0:T(128)E(4)S(1)}", 4),
        ("f4e2m1fn[8]", 8),
        ("f32[<=8,4]", 128),
        ("token[]", 0),
        ("opaque[]", 0),
        ("()", 0),
        ("(f32[2], (s32[], pred[3]))", 15),
    ],
)
def test_bytes_are_those_of_xla(text: str, size: int) -> None:
    assert hlo.parse(header(f"({text})->()")).parameters[0].bytes == size


def test_dynamic_dimensions_are_kept_apart_from_static_ones() -> None:
    module = hlo.parse(header("(f32[<=8,4,<=2])->f32[8,4,2]"))
    assert module.parameters[0] == HloShape("f32", (8, 4, 2), dynamic=(0, 2))
    assert str(module.parameters[0]) == "f32[<=8,4,<=2]"
    assert module.parameters[0] != module.result


ENTRY = """HloModule m, input_output_alias={ {0}: (1, {0}, may-alias) }

helper {
  ROOT x = f32[9] parameter(0)
}

ENTRY main {
  w = f32[2]{0} parameter(0), sharding={replicated}, metadata={op_name="a\\"}b" source_line=1}
  t = (f32[3]{0:T(256)}, /*index=1*/s32[]) parameter(1), frontend_attributes={k="}\\n"}
  c = f32[2,2] constant({ { 1, 2 },
    { 3, 4 } })
  g = f32[3] get-tuple-element(t), index=0, backend_config={"a":[1,2],"b":"}"}
  s = f32[8]{0} all-gather(w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  ROOT r = (f32[3], f32[2]) tuple(g, w)
  last = f32[] constant(0)
}, execution_thread="main"
"""


def test_a_short_entry_computation_gives_the_signature(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text(ENTRY)
    for module in (hlo.parse(ENTRY), hlo.parse(file)):
        assert list(map(str, module.parameters)) == ["f32[2]", "(f32[3], s32[])"]
        assert str(module.result) == "(f32[3], f32[2])"
        assert module.entry == "main"
        assert str(module.shape_of(module.aliases[0])) == "f32[3]"


def test_without_a_root_the_last_instruction_is_the_result() -> None:
    module = hlo.parse("HloModule m\nENTRY e { a = f32[2] parameter(0)\n b = f32[3] constant(0)}")
    assert (module.parameters, module.result) == ((HloShape("f32", (2,)),), HloShape("f32", (3,)))


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found the end of the text at offset 0, expected 'HloModule', or the path of a file"),
        ("no/such/file.txt", "found 'no/such/file.txt' at offset 0, expected 'HloModule', or the"),
        ("A HloModule m", "found 'A HloModule m' at offset 0, expected 'HloModule'"),
        ("HloModule ,", "found ',' at offset 10, expected the name of the module"),
        (
            "HloModule m",
            "at offset 11, expected entry_computation_layout in the header, or an ENTRY",
        ),
        ("HloModule m, =", "found '=' at offset 13, expected the name of an attribute"),
        ("HloModule m, a b", "found 'b' at offset 15, expected '='"),
        ("HloModule m, a={b", "at offset 17, expected a closing bracket for '{' at offset 15"),
        ('HloModule m, a="b', 'found the end of the text at offset 17, expected a closing "'),
        ("HloModule m, a=/*b", "found the end of the text at offset 18, expected a closing */"),
        ("HloModule m, a=1 b=2", "found 'b=2' at offset 17, expected ',' or the end of the header"),
        (header("(f32[2])->f32[2]") + " x=1", "found 'x=1' at offset 57, expected ',' or the end"),
        (header("(f32[2])"), "found '}' at offset 47, expected '->'"),
        (header("(f32[2]->f32[]"), "found '->f32[]}' at offset 46, expected ',' or ')'"),
        (
            header("(f32[?])->()"),
            "found '?])->()}' at offset 44, expected a dimension such as 8 or",
        ),
        (header("(f32[2,])->()"), "found '])->()}' at offset 46, expected a dimension such as 8"),
        (header("(g32[2])->()"), "found 'g32[2])->()}' at offset 40, expected an HLO element type"),
        (header("(f32)->()"), "found 'f32)->()}' at offset 40, expected a shape such as f32[8,4]"),
        (header("(" * 99), "at offset 104, expected at most 64 tuples in each other"),
        (header("()->()", "num_partitions=x"), "found 'x, entry_computation_lay' at offset 28"),
        (header("()->()", "buffer_donor={ 3 }"), "found '3 }, entry_computation_l' at offset 28"),
        (
            header("(f32[2])->()", "buffer_donor={ (1, {}) }"),
            "at offset 28, expected a parameter number below 1",
        ),
        (
            header("(f32[2])->()", "buffer_donor={ (0, {0}) }"),
            "at offset 28, expected an index within parameter 0, f32[2]",
        ),
        (
            header("(f32[2])->f32[2]", "input_output_alias={ {0}: (0, {}) }"),
            "at offset 34, expected an output index within the result f32[2]",
        ),
        (
            header("(f32[2])->f32[2]", "input_output_alias={ {}: (0, {}, no-alias) }"),
            "at offset 46, expected may-alias or must-alias",
        ),
        ("HloModule m\nENTRY e {\n}", "expected an instruction in the ENTRY computation"),
        (
            "HloModule m\nENTRY e {\n a = f32[] parameter(1)\n}",
            "expected parameter(0) before the end of the ENTRY computation",
        ),
        (
            "HloModule m\nENTRY e {\n a = f32[] parameter(0)\n b = f32[] parameter(0)\n}",
            "found '0)\\n}' at offset 67, expected each parameter once",
        ),
    ],
)
def test_bad_text_is_told_with_its_offset(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        hlo.parse(text)
    assert str(error.value).startswith("HLO text: found ")
    assert message in str(error.value)


def test_an_index_outside_a_shape_is_an_index_error() -> None:
    shape = HloShape("tuple", elements=(HloShape("f32", (2,)),))
    assert shape.at((0,)) == HloShape("f32", (2,))
    with pytest.raises(IndexError, match=r"\(f32\[2\]\) has no element \{1\}"):
        shape.at((1,))


# Size


class Scanned(str):
    """A text that counts what is looked at other than by a pattern."""

    def find(self, *where: Any) -> int:
        found = super().find(*where)
        _work.characters += (len(self) if found < 0 else found) - (where[1] if len(where) > 1 else 0)
        return found

    def __getitem__(self, where: Any) -> str:
        found = super().__getitem__(where)
        _work.characters += len(found)
        return found


class Counting:
    """A pattern that counts the characters that it has gone over; without a match, all up to the end."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.groups = pattern, pattern.groups

    def match(self, text: str, position: int = 0) -> re.Match[str] | None:
        return self.count(self.pattern.match(text, position), text, position)

    def search(self, text: str, position: int = 0) -> re.Match[str] | None:
        return self.count(self.pattern.search(text, position), text, position)

    def count(self, found: re.Match[str] | None, text: str, position: int) -> re.Match[str] | None:
        _work.characters += (len(text) if found is None else found.end()) - position
        return found


class Work:
    """The outcome of a parse."""

    calls = 0  #: of functions, of Python's and of C
    characters = 0  #: that patterns, searches and slices went over
    refused = False

    def called(self, frame: FrameType, event: str, argument: object) -> None:
        self.calls += event in ("call", "c_call")


_work = Work()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Work]:
    """Parses a text; what that took."""
    for name, pattern in vars(parser).copy().items():
        if isinstance(pattern, re.Pattern):
            monkeypatch.setattr(parser, name, Counting(pattern))

    def of(text: str) -> Work:
        global _work
        _work = Work()
        sys.setprofile(_work.called)
        try:
            hlo.parse(Scanned(text))
        except ValueError:
            _work.refused = True
        finally:
            sys.setprofile(None)
        return _work

    return of


def with_parameters(count: int) -> str:
    shapes = ", ".join(f"/*index={i}*/bf16[{i + 1},128]{{1,0:T(8,128)(2,1)}}" for i in range(count))
    donors = ", ".join(f"({i}, {{}})" for i in range(count))
    return header(f"({shapes})->({shapes})", f"buffer_donor={{ {donors} }}")


def test_ten_thousand_parameters_are_read() -> None:
    module = hlo.parse(with_parameters(10_000))
    assert len(module.parameters) == len(module.results) == len(module.donors) == 10_000
    assert module.donated_bytes == 2 * 128 * 10_000 * 10_001 // 2


def test_the_work_grows_as_the_number_of_parameters(work: Callable[[str], Work]) -> None:
    once, four_times = work(with_parameters(250)), work(with_parameters(1000))
    assert not once.refused and not four_times.refused
    assert once.calls > 4 * 250
    assert once.characters > len(with_parameters(250))
    # A little more than four times, as numbers get more digits; squares would give sixteen times.
    assert four_times.calls < 4.5 * once.calls
    assert four_times.characters < 4.5 * once.characters


BROKEN = ['\\"', '"', "(", "{", "/*", "//", "[", " ", "f32[", "a=1,", '"\\']
STARTS = ["HloModule m, a=", 'HloModule m, a={"', "HloModule m, entry_computation_layout={("]


@pytest.mark.parametrize("part", BROKEN)
@pytest.mark.parametrize("start", STARTS)
def test_the_work_grows_as_a_broken_text(work: Callable[[str], Work], start: str, part: str) -> None:
    once, four_times = work(start + part * 500), work(start + part * 2000)
    assert once.refused and four_times.refused
    assert four_times.calls < 4.5 * once.calls + 100
    assert four_times.characters < 4.5 * once.characters + 100


@in_process
def test_a_broken_text_of_a_megabyte_is_refused() -> None:
    """A pattern that goes back would take hours; the child's guard ends it."""
    for part in BROKEN:
        for start in STARTS:
            with pytest.raises(ValueError):
                hlo.parse(start + part * (1_000_000 // len(part)))


# Random texts

LAYOUTS = st.sampled_from(["", "{:T(256)}", "{1,0}", "{1,0:T(8,128)(2,1)S(1)}", "{0:E(4)}", "{0}"])
DTYPES = st.sampled_from(
    ["pred", "s4", "u8", "s64", "bf16", "f32", "f64", "f8e4m3fn", "f8e5m2fnuz", "c64", "token", "opaque"]
)


@st.composite
def arrays(draw: st.DrawFn) -> HloShape:
    dims = tuple(draw(st.lists(st.integers(0, 2**40), max_size=4)))
    dynamic = tuple(n for n in range(len(dims)) if draw(st.booleans()))
    return HloShape(draw(DTYPES), dims, dynamic, (), draw(LAYOUTS))


SHAPES = st.recursive(
    arrays(),
    lambda inner: st.lists(inner, max_size=7).map(lambda elements: HloShape("tuple", elements=tuple(elements))),
    max_leaves=20,
)


@st.composite
def modules(draw: st.DrawFn) -> HloModule:
    parameters = tuple(draw(st.lists(SHAPES, max_size=8)))
    result = draw(SHAPES)
    module = HloModule(
        draw(st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]*", fullmatch=True)),
        parameters,
        result,
        num_partitions=draw(st.integers(1, 4096)),
        replica_count=draw(st.integers(1, 4096)),
    )
    inputs = draw(st.permutations(sorted(module.leaves)))
    outputs = draw(st.permutations([index for index, _ in result.leaves()]))
    count = draw(st.integers(0, min(len(inputs), len(outputs))))
    kinds: st.SearchStrategy[Literal["may", "must"]] = st.sampled_from(["may", "must"])
    pairs = zip(outputs[:count], inputs[:count], strict=True)
    return HloModule(
        module.name,
        parameters,
        result,
        donors=tuple(BufferDonor(*key) for key in inputs[count:] if draw(st.booleans())),
        aliases=tuple(Alias(output, *key, draw(kinds)) for output, key in pairs),
        num_partitions=module.num_partitions,
        replica_count=module.replica_count,
    )


def written(module: HloModule) -> str:
    """The module's header as XLA prints it, with a comment at every fifth element of a tuple."""

    def shape(value: HloShape) -> str:
        if value.is_tuple:
            return f"({shapes(value.elements)})"
        return f"{value}{value.layout}"

    def shapes(values: tuple[HloShape, ...]) -> str:
        return ", ".join((f"/*index={n}*/" if n and n % 5 == 0 else "") + shape(v) for n, v in enumerate(values))

    parts = [f"HloModule {module.name}", "is_scheduled=true"]
    if module.aliases:
        parts.append(f"input_output_alias={{ {', '.join(map(str, module.aliases))} }}")
    if module.donors:
        parts.append(f"buffer_donor={{ {', '.join(map(str, module.donors))} }}")
    signature = f"({shapes(module.parameters)})->{shape(module.result)}"
    parts.append(f"entry_computation_layout={{{signature}}}")
    if module.replica_count != 1:
        parts.append(f"replica_count={module.replica_count}")
    if module.num_partitions != 1:
        parts.append(f"num_partitions={module.num_partitions}")
    parts.append(r'frontend_attributes={a="\"}{(",b="x"}')
    return ", ".join(parts) + "\n\n"


@given(modules())
def test_a_written_module_is_read_back_as_it_was(module: HloModule) -> None:
    read = hlo.parse(written(module))
    assert read == module
    assert written(read) == written(module)
    assert read.donated_bytes == sum(read.leaves[d.parameter_number, d.parameter_index].bytes for d in module.donors)


@given(st.data())
def test_a_damaged_text_is_read_or_refused_with_a_value_error(data: st.DataObject) -> None:
    text = data.draw(modules().map(written) | st.just(ENTRY))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 5)))
        text = text[:start] + data.draw(st.text('{}()[]",=:<>*/\\ \nf32E1', max_size=3)) + text[end:]
    try:
        read = hlo.parse(text)
    except ValueError as error:
        assert "expected" in str(error)
    else:
        assert read.donated_bytes >= 0 and read.aliased_bytes >= 0 and str(read.result)


@given(st.text() | st.text().map("HloModule m, ".__add__))
def test_any_text_is_refused_with_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        hlo.parse(text)
