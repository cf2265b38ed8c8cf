"""Reads donors and aliases from the header of XLA's HLO text.

A donor is an input buffer that the step offers (`buffer_donor={ (0, {}) }`); an alias is an output
that XLA placed in an input's buffer (`input_output_alias={ {0}: (0, {}, may-alias) }`). torch_xla
writes donors, XLA's optimisation turns those that fit into aliases and leaves the others as donors.

What the files look like, seen with torch_xla 2.9.0 on CPU, and in XLA's own printer and dumper
(`xla/hlo/ir/hlo_module.cc`, `xla/service/dump.cc`) for what a CPU never writes:

- A module leaves `module_0001.SyncTensorsGraph.4.before_optimizations.txt` and
  `module_0001.SyncTensorsGraph.4.cpu_after_optimizations.txt`; other backends write another prefix
  before `after_optimizations` (`sm_8.0_gpu_`). The number counts the modules of one process, in
  four digits or more. `--xla_dump_include_timestamp` puts `<microseconds>.` in front of both; a
  name that makes the file name longer than 255 characters is left out of it.
- The files `...-buffer-assignment.txt` and `...-memory-usage-report.txt` beside them are not HLO.
- All that is read here is in the first line. XLA prints `replica_count` and `num_partitions` only
  when they are not 1, and an attribute only when it is not empty.
- Before optimisation the shapes of an SPMD module are global, after it they are those of one
  device; the numbers of the parameters stay.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

_T = TypeVar("_T")

# Bits of one element, by the names in XLA's xla_data.proto, in lower case as HLO text has them.
_BITS = {
    "pred": 8,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    "f16": 16,
    "bf16": 16,
    "f32": 32,
    "f64": 64,
    "c64": 64,
    "c128": 128,
    "f4e2m1fn": 4,
    "f8e3m4": 8,
    "f8e4m3": 8,
    "f8e4m3fn": 8,
    "f8e4m3b11fnuz": 8,
    "f8e4m3fnuz": 8,
    "f8e5m2": 8,
    "f8e5m2fnuz": 8,
    "f8e8m0fnu": 8,
    "token": 0,
    "opaque": 0,
}
# The recursion follows the nesting of tuples; torch_xla nests twice at most.
_MAX_TUPLE_DEPTH = 64

# The first characters of what _BLANK skips.
_BLANK_STARTS = frozenset(" \t\r\n\f\v/")
_BLANK = re.compile(r"(?:[ \t\r\n\f\v]+|/\*.*?\*/|//[^\n]*)*", re.DOTALL)
# The layout follows without a blank: the brace of `-> f32[8] {` opens a computation.
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\[\](){}]*)\](\{[^{}\"]*\})?")
_DIMENSION = re.compile(r"\s*(<=)?([0-9]{1,19})\s*\Z")
_ELEMENT_BITS = re.compile(r"E\(([0-9]{1,4})\)")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)
_NAME = re.compile(r"%?([^\s,({]+)")
_NUMBER = re.compile(r"[0-9]{1,18}(?![0-9])")
_BRACKETS = "{}()[]"
_MARK = re.compile(r'[,\s"{}()\[\]]|/\*')
# No closing quote in the pattern: a match that can fail would be tried again from every quote.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_ENTRY = re.compile(r"^[ \t]*ENTRY[ \t]+%?([^\s({]+)", re.MULTILINE)
_FILE = re.compile(r"(?:([0-9]+)\.)?module_([0-9]+)\.(.+)\.txt")
_STAGE = re.compile(r"(?:^|[._])(before_optimizations|after_optimizations)\Z")

_HOW_TO_DUMP = 'set XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text" before torch_xla starts'


@dataclass(frozen=True, slots=True)
class HloShape:
    """The shape of an array, a token, an opaque value or a tuple.

    dtype: XLA's name (`f32`, `bf16`, `pred`, `s64`, `u4`, `f8e4m3fn`, `c64`, `token`, `opaque`),
        or `tuple`.
    dims: the sizes; of a dynamic dimension (`<=8`) its bound.
    dynamic: the numbers of the dynamic dimensions.
    elements: the shapes in a tuple.
    layout: as written, braces included (`{1,0:T(8,128)S(1)}`); two shapes that differ in nothing
        else are equal.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    dynamic: tuple[int, ...] = ()
    elements: tuple[HloShape, ...] = ()
    layout: str = field(default="", compare=False)

    @property
    def is_tuple(self) -> bool:
        """True for a tuple, the empty one too."""
        return self.dtype == "tuple"

    @property
    def bytes(self) -> int:
        """Bytes of the elements, as XLA's `ShapeUtil::ByteSizeOfElements` counts them.

        `pred` takes 1 byte. Types below 8 bits take a whole byte an element, unless the layout
        packs them (`E(4)`): then the bits are added up and rounded to bytes. A dynamic dimension
        counts with its bound, a tuple with the sum of its elements (without the table of
        pointers), `token` and `opaque` with 0. Padding to a TPU's tiles is not counted.
        """
        if self.is_tuple:
            return sum(element.bytes for element in self.elements)
        packed = _ELEMENT_BITS.search(self.layout)
        bits = int(packed[1]) if packed else 0
        # E(0) is XLA's way of saying "not packed".
        if bits:
            return (math.prod(self.dims) * bits + 7) // 8
        return math.prod(self.dims) * ((_BITS[self.dtype] + 7) // 8)

    def at(self, index: tuple[int, ...]) -> HloShape:
        """The shape at a tuple index, `()` being the shape itself; IndexError if there is none."""
        shape = self
        for step in index:
            if not 0 <= step < len(shape.elements):
                raise IndexError(f"{_brief(self)} has no element {_index_text(index)}")
            shape = shape.elements[step]
        return shape

    def leaves(self) -> Iterator[tuple[tuple[int, ...], HloShape]]:
        """Each index of a shape that is no tuple, and that shape, in order."""
        if not self.is_tuple:
            yield (), self
        for number, element in enumerate(self.elements):
            for index, leaf in element.leaves():
                yield (number, *index), leaf

    def __str__(self) -> str:
        if self.is_tuple:
            return f"({', '.join(map(str, self.elements))})"
        bounds = ("<=" if number in self.dynamic else "" for number in range(len(self.dims)))
        sizes = ",".join(f"{bound}{size}" for bound, size in zip(bounds, self.dims, strict=True))
        return f"{self.dtype}[{sizes}]"


@dataclass(frozen=True, slots=True, order=True)
class BufferDonor:
    """An input buffer that the module may overwrite with any output: `(3, {1})`.

    parameter_index is `()` for a plain parameter, and the place inside it when torch_xla wrapped
    all parameters in one tuple.
    """

    parameter_number: int
    parameter_index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"({self.parameter_number}, {_index_text(self.parameter_index)})"


@dataclass(frozen=True, slots=True, order=True)
class Alias:
    """An output that lives in an input's buffer: `{0}: (3, {1}, may-alias)`.

    kind: with `may` XLA copies when the caller did not hand the buffer over, with `must` it fails.
    """

    output_index: tuple[int, ...]
    parameter_number: int
    parameter_index: tuple[int, ...] = ()
    kind: Literal["may", "must"] = "may"

    @property
    def donor(self) -> BufferDonor:
        """The input that gave its buffer."""
        return BufferDonor(self.parameter_number, self.parameter_index)

    def __str__(self) -> str:
        index = _index_text(self.parameter_index)
        output = _index_text(self.output_index)
        return f"{output}: ({self.parameter_number}, {index}, {self.kind}-alias)"


@dataclass(frozen=True, slots=True)
class HloModule:
    """One HLO text: its signature, its donors and its aliases.

    result: the shape of the whole result; `results` are the outputs.
    donors: of a text after optimisation those that found no output.
    num_partitions, replica_count: 1 if the text does not give them. With more than one partition
        the shapes after optimisation, and so all bytes, are those of one device.
    path: the file that was read, or None.
    module_id, stage: from the name of a dump file, else None. stage is `before_optimizations`,
        `after_optimizations`, or what the file name has after the module's name.
    """

    name: str
    parameters: tuple[HloShape, ...]
    result: HloShape
    donors: tuple[BufferDonor, ...] = ()
    aliases: tuple[Alias, ...] = ()
    num_partitions: int = 1
    replica_count: int = 1
    path: Path | None = None
    module_id: int | None = None
    stage: str | None = None
    _entry: str | None = field(default=None, repr=False, compare=False)

    @property
    def results(self) -> tuple[HloShape, ...]:
        """The outputs: the elements of the result if it is a tuple, else the result alone."""
        return self.result.elements if self.result.is_tuple else (self.result,)

    @property
    def entry(self) -> str | None:
        """The name of the entry computation, None if the text has none.

        It is not in the header: each use searches the file that the module was read from.
        """
        if self._entry is None and self.path is not None:
            with open(self.path, encoding="utf-8", errors="replace") as lines:
                return next((found[1] for line in lines if (found := _ENTRY.match(line))), None)
        return self._entry

    @property
    def leaves(self) -> dict[tuple[int, tuple[int, ...]], HloShape]:
        """Every input buffer: (parameter_number, parameter_index) -> shape."""
        return {
            (number, index): leaf
            for number, parameter in enumerate(self.parameters)
            for index, leaf in parameter.leaves()
        }

    def shape_of(self, buffer: BufferDonor | Alias) -> HloShape:
        """The shape of the input that a donor or an alias of this module names."""
        return self.parameters[buffer.parameter_number].at(buffer.parameter_index)

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donors in this text; see `HloShape.bytes`."""
        return sum(self.shape_of(donor).bytes for donor in self.donors)

    @property
    def aliased_bytes(self) -> int:
        """Bytes of the inputs that outputs live in; see `HloShape.bytes`."""
        return sum(self.shape_of(alias).bytes for alias in self.aliases)


@dataclass(frozen=True, slots=True)
class DumpedModule:
    """A module as a dump shows it: what was asked for (`before`) and what XLA did (`after`).

    One of the two is None if its file is missing, for instance `after` when compiling failed.
    """

    before: HloModule | None
    after: HloModule | None

    @property
    def name(self) -> str:
        """The module's name, such as `SyncTensorsGraph.57`."""
        return self._compiled.name

    @property
    def module_id(self) -> int | None:
        """The number of the module in its process."""
        return self._compiled.module_id

    @property
    def donors(self) -> tuple[BufferDonor, ...]:
        """The inputs that were offered."""
        if self.before is not None:
            return self.before.donors
        # A donor ends up as an alias or stays a donor, so what is left shows what was asked.
        compiled = self._compiled
        return tuple(sorted({*compiled.donors, *(alias.donor for alias in compiled.aliases)}))

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """The outputs that live in an input's buffer; none as long as `after` is None."""
        return () if self.after is None else self.after.aliases

    @property
    def unused_donors(self) -> tuple[BufferDonor, ...]:
        """The donors that found no output; all of them as long as `after` is None."""
        used = {alias.donor for alias in self.aliases}
        return tuple(donor for donor in self.donors if donor not in used)

    def shape_of(self, buffer: BufferDonor | Alias) -> HloShape:
        """The shape of an input on one device (while `after` is None: the global one)."""
        return self._compiled.shape_of(buffer)

    @property
    def donated_bytes(self) -> int:
        """Bytes that were offered, on one device; see `HloShape.bytes`."""
        return sum(self.shape_of(donor).bytes for donor in self.donors)

    @property
    def aliased_bytes(self) -> int:
        """Bytes of inputs that outputs live in, on one device; see `HloShape.bytes`."""
        return 0 if self.after is None else self.after.aliased_bytes

    @property
    def _compiled(self) -> HloModule:
        module = self.after or self.before
        if module is None:
            raise ValueError("found neither before nor after, expected at least one HloModule")
        return module


def parse(text_or_path: str | os.PathLike[str]) -> HloModule:
    """Reads one module from HLO text, or from a file with HLO text.

    A `str` that starts with `HloModule`, or names no file, is text; an `os.PathLike` is a path. Of
    a file no more than the header line is read when that gives the signature
    (`entry_computation_layout`); otherwise the signature comes from the instructions of `ENTRY`.

    Raises ValueError for what is not HLO: it says what was found at which offset (in characters)
    and what was expected; OSError if a file cannot be read.
    """
    if not isinstance(text_or_path, str):
        return _parse_file(Path(text_or_path))
    if not text_or_path.lstrip().startswith("HloModule") and os.path.isfile(text_or_path):
        return _parse_file(Path(text_or_path))
    parser = _Parser(text_or_path, "HLO text")
    if "HloModule" not in text_or_path:
        parser.fail("'HloModule', or the path of a file that exists")
    module = parser.module()
    entry = _ENTRY.search(text_or_path)
    return module if entry is None else replace(module, _entry=entry[1])


def parse_shape(text: str) -> HloShape:
    """Reads one shape, such as `f32[8,4]{1,0}` or a tuple of them. Raises ValueError as `parse` does."""
    parser = _Parser(text, "shape")
    shape = parser.shape()
    parser.blank()
    if parser.position != len(text):
        parser.fail("the end of the shape")
    return shape


_PARAMETER = re.compile(r"^\s*%?([\w.-]+) = .* parameter\((\d+)\)", re.MULTILINE)
_ELEMENT = re.compile(r"^\s*%?([\w.-]+) = .* get-tuple-element\((?:\S+ )?%?([\w.-]+)\), index=(\d+)", re.MULTILINE)
_COPY = re.compile(r" = (\S+) copy\((?:\S+ )?%?([\w.-]+)\)")


def copied_parameters(text: str) -> list[tuple[int, int]]:
    """The copies of parameters in the entry computation of an optimised module: (parameter number, bytes).

    Of a single parameter that is a tuple the number is that of its element.
    """
    entry = text[found.start() :] if (found := _ENTRY.search(text)) else ""
    parameters = {name: int(number) for name, number in _PARAMETER.findall(entry)}
    numbers = dict(parameters)
    for name, source, index in _ELEMENT.findall(entry):
        if source in parameters and len(parameters) == 1:
            numbers[name] = int(index)
    return [(numbers[source], parse_shape(shape).bytes) for shape, source in _COPY.findall(entry) if source in numbers]


def read_dump(folder: str | os.PathLike[str]) -> tuple[DumpedModule, ...]:
    """Reads a folder that XLA dumped to: its modules in the order of their compilation.

    Only the texts before and after optimisation are read; see the top of this file for their names.
    They are paired by the module's number and by the name in their header. XLA numbers the modules
    of each process from 0: give each process a folder of its own.

    Raises FileNotFoundError, with the flags to set, if the folder is missing or has no such file;
    ValueError as `parse` does.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"found no folder {folder}, expected one that XLA dumped to: {_HOW_TO_DUMP}")
    names = sorted(os.listdir(folder))
    pairs: dict[tuple[int, int, str], dict[str, HloModule]] = {}
    for name in names:
        dumped = _FILE.fullmatch(name)
        stage = dumped and _STAGE.search(dumped[3])
        if dumped and stage:
            module = _parse_file(folder / name)
            key = (int(dumped[1] or 0), int(dumped[2]), module.name)
            pairs.setdefault(key, {})[stage[1]] = module
    if not pairs:
        raise FileNotFoundError(
            f"found {len(names)} files but no HLO in {folder}, expected"
            f" module_*.before_optimizations.txt and module_*after_optimizations.txt:"
            f" {_HOW_TO_DUMP}"
        )
    return tuple(
        DumpedModule(pair.get("before_optimizations"), pair.get("after_optimizations"))
        for _, pair in sorted(pairs.items(), key=lambda item: item[0])
    )


def _parse_file(path: Path) -> HloModule:
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.readline()
        module = _complete_header(text)
        if module is None:
            text += file.read()
            module = _Parser(text, str(path)).module()
    dumped = _FILE.fullmatch(path.name)
    if dumped is None:
        return replace(module, path=path)
    known = _STAGE.search(dumped[3])
    stage = known[1] if known else dumped[3].removeprefix(f"{module.name}.")
    return replace(module, path=path, module_id=int(dumped[2]), stage=stage)


def _complete_header(line: str) -> HloModule | None:
    """The module if its header is this line; None if the rest of the text has to be read."""
    if "entry_computation_layout" not in line:
        return None
    try:
        return _Parser(line, "").module()
    except ValueError:
        return None


def _index_text(index: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, index)) + "}"


def _brief(shape: HloShape) -> str:
    text = str(shape)
    return text if len(text) <= 80 else f"a tuple of {len(shape.elements)} elements"


def _has(shape: HloShape, index: tuple[int, ...]) -> bool:
    try:
        shape.at(index)
    except IndexError:
        return False
    return True


class _Parser:
    """A recursive descent over HLO text; `position` only ever moves forward."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.position = 0

    def module(self) -> HloModule:
        if self.take(_WORD, "'HloModule'") != "HloModule":
            self.fail("'HloModule'", 0)
        name = self.take(_NAME, "the name of the module")
        donors: list[tuple[int, BufferDonor]] = []
        aliases: list[tuple[int, Alias]] = []
        signature: tuple[tuple[HloShape, ...], HloShape] | None = None
        counts = {"num_partitions": 1, "replica_count": 1}
        while self.next_attribute():
            attribute = self.take(_WORD, "the name of an attribute")
            self.expect("=")
            if attribute == "buffer_donor":
                donors = list(self.list_of(self.donor))
            elif attribute == "input_output_alias":
                aliases = list(self.list_of(self.alias))
            elif attribute == "entry_computation_layout":
                signature = self.computation_layout()
            elif attribute in counts:
                counts[attribute] = self.number()
            else:
                self.skip_value(ends=", \t\n)}]")
        parameters, result = signature or self.entry_signature()
        for offset, donor in donors:
            self.check_parameter(parameters, donor, offset)
        for offset, alias in aliases:
            self.check_parameter(parameters, alias.donor, offset)
            if not _has(result, alias.output_index):
                self.fail(f"an output index within the result {_brief(result)}", offset)
        return HloModule(
            name=name,
            parameters=parameters,
            result=result,
            donors=tuple(donor for _, donor in donors),
            aliases=tuple(alias for _, alias in aliases),
            num_partitions=counts["num_partitions"],
            replica_count=counts["replica_count"],
        )

    def next_attribute(self) -> bool:
        """True after the comma before an attribute, False at the end of the header."""
        end = self.position
        if self.eat(","):
            return True
        at_end = self.position == len(self.text) or "\n" in self.text[end : self.position]
        if not at_end and not self.text.startswith("ENTRY", self.position):
            self.fail("',' or the end of the header line")
        return False

    def computation_layout(self) -> tuple[tuple[HloShape, ...], HloShape]:
        self.expect("{")
        self.expect("(")
        parameters = self.shapes()
        self.expect("->")
        result = self.shape()
        self.expect("}")
        return parameters, result

    def entry_signature(self) -> tuple[tuple[HloShape, ...], HloShape]:
        entry = _ENTRY.search(self.text, self.position)
        if entry is None:
            self.fail("entry_computation_layout in the header, or an ENTRY computation")
        self.position = entry.end()
        self.blank()
        if self.text.startswith("(", self.position):
            self.skip_group()
            self.expect("->")
            self.shape()
        self.expect("{")
        parameters: dict[int, HloShape] = {}
        result: HloShape | None = None
        rooted = False
        while not self.eat("}"):
            name = self.take(_NAME, "an instruction or '}'")
            is_root = name == "ROOT"
            if is_root:
                self.take(_NAME, "the name of an instruction")
            self.expect("=")
            shape = self.shape()
            # Without a ROOT the last instruction is the root.
            if is_root or not rooted:
                result, rooted = shape, is_root
            if self.take(_WORD, "an opcode") == "parameter":
                self.expect("(")
                self.blank()
                offset, number = self.position, self.number()
                if number in parameters:
                    self.fail("each parameter once", offset)
                parameters[number] = shape
                self.expect(")")
            self.skip_value()
            while self.eat(","):
                self.skip_value()
        if result is None:
            self.fail("an instruction in the ENTRY computation")
        for number in range(len(parameters)):
            if number not in parameters:
                self.fail(f"parameter({number}) before the end of the ENTRY computation")
        return tuple(parameters[number] for number in range(len(parameters))), result

    def shapes(self, depth: int = 0) -> tuple[HloShape, ...]:
        """Shapes up to the ')' that belongs to a '(' just read."""
        if self.eat(")"):
            return ()
        shapes = [self.shape(depth)]
        while not self.eat(")"):
            self.expect(",", "',' or ')'")
            shapes.append(self.shape(depth))
        return tuple(shapes)

    def shape(self, depth: int = 0) -> HloShape:
        if self.eat("("):
            if depth == _MAX_TUPLE_DEPTH:
                self.fail(f"at most {_MAX_TUPLE_DEPTH} tuples in each other", self.position - 1)
            return HloShape("tuple", elements=self.shapes(depth + 1))
        array = _ARRAY.match(self.text, self.position)
        if array is None:
            self.fail("a shape such as f32[8,4] or (f32[8,4], s32[])")
        dtype = array[1]
        if dtype not in _BITS:
            self.fail("an HLO element type such as f32, bf16, s64 or pred")
        dims: list[int] = []
        dynamic: list[int] = []
        offset = array.start(2)
        for text in array[2].split(",") if array[2] else ():
            size = _DIMENSION.match(text)
            if size is None:
                self.fail("a dimension such as 8 or <=8", offset)
            if size[1]:
                dynamic.append(len(dims))
            dims.append(int(size[2]))
            offset += len(text) + 1
        self.position = array.end()
        layout = array[3] or ""
        if not layout and self.text.startswith("{", self.position):
            self.skip_group()
            layout = self.text[array.end() : self.position]
        return HloShape(dtype, tuple(dims), tuple(dynamic), (), layout)

    def list_of(self, item: Callable[[], _T]) -> Iterator[tuple[int, _T]]:
        """Items between braces, each with its offset."""
        self.expect("{")
        if self.eat("}"):
            return
        while True:
            self.blank()
            offset = self.position
            yield offset, item()
            if self.eat("}"):
                return
            self.expect(",", "',' or '}'")

    def index(self) -> tuple[int, ...]:
        return tuple(number for _, number in self.list_of(self.number))

    def donor(self) -> BufferDonor:
        self.expect("(")
        number = self.number()
        self.expect(",")
        index = self.index()
        self.expect(")")
        return BufferDonor(number, index)

    def alias(self) -> Alias:
        output_index = self.index()
        self.expect(":")
        self.expect("(")
        number = self.number()
        self.expect(",")
        index = self.index()
        kind: Literal["may", "must"] = "may"
        if self.eat(","):
            self.blank()
            offset = self.position
            word = self.take(_WORD, "may-alias or must-alias")
            if word not in ("may-alias", "must-alias"):
                self.fail("may-alias or must-alias", offset)
            kind = "must" if word == "must-alias" else "may"
        self.expect(")")
        return Alias(output_index, number, index, kind)

    def check_parameter(self, parameters: tuple[HloShape, ...], donor: BufferDonor, offset: int) -> None:
        number = donor.parameter_number
        if number >= len(parameters):
            self.fail(f"a parameter number below {len(parameters)}", offset)
        if not _has(parameters[number], donor.parameter_index):
            self.fail(f"an index within parameter {number}, {_brief(parameters[number])}", offset)

    def skip_value(self, ends: str = ",\n)}]") -> None:
        """Goes to the first of `ends` behind the position that is in no bracket or string."""
        while mark := _MARK.search(self.text, self.position):
            self.position = mark.start()
            if mark[0] in ends:
                return
            self.skip_mark(mark[0])
        self.position = len(self.text)

    def skip_group(self) -> None:
        """Goes behind the bracket that closes the one at the position."""
        opened = self.position
        depth = 0
        while mark := _MARK.search(self.text, self.position):
            self.position = mark.start()
            if mark[0] in "{([":
                depth += 1
            elif mark[0] in "})]":
                depth -= 1
            if mark[0] in _BRACKETS:
                self.position += 1
                if not depth:
                    return
            else:
                self.skip_mark(mark[0])
        self.fail(f"a closing bracket for {self.text[opened]!r} at offset {opened}", len(self.text))

    def skip_mark(self, mark: str) -> None:
        if mark in "{([":
            self.skip_group()
        elif mark == "/*":
            self.skip_to("*/", self.text.find("*/", self.position + 2))
        elif mark == '"':
            string = _STRING.match(self.text, self.position)
            end = len(self.text) if string is None else string.end()
            self.skip_to('"', end if self.text.startswith('"', end) else -1)
        else:
            self.position += 1

    def skip_to(self, closing: str, offset: int) -> None:
        if offset < 0:
            self.fail(f"a closing {closing}", len(self.text))
        self.position = offset + len(closing)

    def number(self) -> int:
        return int(self.take(_NUMBER, "a number"))

    def take(self, pattern: re.Pattern[str], expected: str) -> str:
        self.blank()
        found = pattern.match(self.text, self.position)
        if found is None:
            self.fail(expected)
        self.position = found.end()
        return found[pattern.groups]

    def expect(self, token: str, expected: str = "") -> None:
        if not self.eat(token):
            self.fail(expected or repr(token))

    def eat(self, token: str) -> bool:
        self.blank()
        if not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def blank(self) -> None:
        if self.text[self.position : self.position + 1] in _BLANK_STARTS:
            blank = _BLANK.match(self.text, self.position)
            self.position = self.position if blank is None else blank.end()

    def fail(self, expected: str, offset: int | None = None) -> NoReturn:
        offset = self.position if offset is None else offset
        rest = self.text[offset : offset + 24]
        found = repr(rest) if rest else "the end of the text"
        raise ValueError(f"{self.source}: found {found} at offset {offset}, expected {expected}")
