"""Reading HLO: folders of dumps, the corners of the syntax, and random texts."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from helpers import error_of
from hypothesis import given
from hypothesis import strategies as st

from torch_xla_donate import hlo
from torch_xla_donate.hlo import Alias, BufferDonor, DumpedModule, HloModule, HloShape
from torch_xla_donate.hlo.dump import copied_bytes

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
    files = "has 1 files, but no module_*.before_optimizations.txt and no module_*after_optimizations.txt"
    gone = tmp_path / "gone"
    for folder, found in [(tmp_path, f"folder {tmp_path} {files}"), (gone, f"{gone} is not a folder")]:
        flags = 'XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text"'
        expected = f"{found}. Set {flags} before torch_xla starts."
        assert error_of(FileNotFoundError, hlo.read_dump, folder) == expected


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "module_0000.f.before_optimizations.txt"
    file.write_text("HloModule f, buffer_donor={ (0")
    expected = f"{file}: found the end of the text at offset 30, expected ','"
    assert error_of(ValueError, hlo.read_dump, tmp_path) == expected


def test_a_file_may_begin_as_an_editor_leaves_it(tmp_path: Path) -> None:
    text = HEADER.format("f", ASKED)
    (tmp_path / "f.txt").write_text(f"\n\n{text}", encoding="utf-8-sig")
    assert hlo.parse(tmp_path / "f.txt").donors == hlo.parse(text).donors == (BufferDonor(0),)


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
    layouts = [
        "{1,0:T(8,128)(2,1)S(1)}",
        "{1,0:T(8,128)(2,1)}",
        "{0,1:D(D,C)L(16)#(u32)SC(0:1,2)}",
        "{1,0:T(8,128)P((s32[3]{0}, s8[2]{0:T(4)}))}",
    ]
    arrays = ", ".join(f"bf16[8,4]{layout}" for layout in layouts)
    module = hlo.parse(header(f"({arrays}, bf16[8,4], u32[]{{:T(256)}})->f32[]{{:T(256)}}"))
    assert [shape.layout for shape in module.parameters] == [*layouts, "", "{:T(256)}"]
    assert module.parameters[:5] == (HloShape("bf16", (8, 4)),) * 5
    assert len(set(module.parameters[:5])) == 1
    assert str(module.parameters[0]) == "bf16[8,4]"
    assert module.results == (HloShape("f32"),)


def test_index_comments_are_skipped_wherever_they_stand() -> None:
    module = hlo.parse(
        "HloModule /*a, b*/ m, buffer_donor={ /*{*/ (1, {}) }, "
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


# Copies


def test_all_copies_of_a_parameter_count() -> None:
    text = """ENTRY %main (p: f32[8,4], q: f32[3]) -> (f32[8,4], f32[8,4]) {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[3]{0} parameter(1)
  %copy.1 = f32[8,4]{1,0} copy(%p)
  %copy.2 = f32[8,4]{0,1} copy(f32[8,4]{1,0} %p)
  ROOT %t = (f32[8,4]{1,0}, f32[8,4]{0,1}) tuple(%copy.1, %copy.2), metadata={op_name=" = f32[8,4] copy(%p)"}
}
"""
    assert copied_bytes(text) == {0: 256}


def test_a_copied_element_of_the_tuple_of_all_parameters_counts() -> None:
    text = """ENTRY %main (p: (f32[8,4], f32[3])) -> f32[3] {
  %p = (f32[8,4]{1,0}, f32[3]{0}) parameter(0)
  %element = f32[3]{0} get-tuple-element(%p), index=1
  ROOT %copy.1 = f32[3]{0} copy(%element)
}
"""
    assert copied_bytes(text) == {1: 12}


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "found the end of the text at offset 0, expected 'HloModule', or the path of a file"),
        ("no/such/file.txt", "found 'no/such/file.txt' at offset 0, expected 'HloModule', or the"),
        ("A HloModule m", "found 'A HloModule m' at offset 0, expected 'HloModule'"),
        ("HloModule ,", "found ',' at offset 10, expected the name of the module"),
        ("HloModule m", "at offset 11, expected entry_computation_layout in the header"),
        ("HloModule m, =", "found '=' at offset 13, expected the name of an attribute"),
        ("HloModule m, a b", "found 'b' at offset 15, expected '='"),
        ("HloModule m, a={b", "at offset 17, expected a closing bracket for '{' at offset 15"),
        ('HloModule m, a="b', 'found the end of the text at offset 17, expected a closing "'),
        ("HloModule m, a=/*b", "found the end of the text at offset 18, expected a closing */"),
        ("HloModule m, a=1 b=2", "found 'b=2' at offset 17, expected ',' or the end of the header"),
        (header("(f32[2])->f32[2]") + " x=1", "found 'x=1' at offset 57, expected ',' or the end"),
        (header("(f32[2])"), "found '}' at offset 47, expected '->'"),
        (header("(f32[2]->f32[]"), "found '->f32[]}' at offset 46, expected ',' or ')'"),
        (header("(f32[?])->()"), "found '?])->()}' at offset 44, expected a dimension such as 8 or"),
        (header("(f32[2,])->()"), "found '])->()}' at offset 46, expected a dimension such as 8"),
        (header("(g32[2])->()"), "found 'g32[2])->()}' at offset 40, expected an HLO element type"),
        (header("(f32)->()"), "found 'f32)->()}' at offset 40, expected a shape such as f32[8,4]"),
        (header("(" * 99), "at offset 104, expected at most 64 tuples in each other"),
        (header("()->()", "num_partitions=x"), "found 'x, entry_computation_lay' at offset 28"),
        (header("()->()", "buffer_donor={ 3 }"), "found '3 }, entry_computation_l' at offset 28"),
        (header("(f32[2])->()", "buffer_donor={ (1, {}) }"), "at offset 28, expected a parameter number below 1"),
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
    ],
)
def test_bad_text_is_told_with_its_offset(text: str, message: str) -> None:
    error = error_of(ValueError, hlo.parse, text)
    assert error.startswith("HLO text: found ") and message in error


def test_an_index_outside_a_shape_is_an_index_error() -> None:
    shape = HloShape("tuple", elements=(HloShape("f32", (2,)),))
    assert shape.at((0,)) == HloShape("f32", (2,))
    with pytest.raises(IndexError, match=r"\(f32\[2\]\) has no element \{1\}"):
        shape.at((1,))


def test_ten_thousand_parameters_are_read() -> None:
    shapes = ", ".join(f"/*index={i}*/bf16[{i + 1},128]{{1,0:T(8,128)(2,1)}}" for i in range(10_000))
    donors = ", ".join(f"({i}, {{}})" for i in range(10_000))
    module = hlo.parse(header(f"({shapes})->({shapes})", f"buffer_donor={{ {donors} }}"))
    assert len(module.parameters) == len(module.results) == len(module.donors) == 10_000
    assert module.donated_bytes == 2 * 128 * 10_000 * 10_001 // 2


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
    text = data.draw(modules().map(written))
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
