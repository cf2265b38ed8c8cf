"""Reads donors and aliases from the header of XLA's HLO text.

A donor is an input buffer that the step offers (`buffer_donor={ (0, {}) }`). An alias is an output
that XLA placed in an input's buffer (`input_output_alias={ {0}: (0, {}, may-alias) }`). torch_xla
writes donors. XLA's optimisation turns the donors that fit into aliases and keeps the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, TypeVar

from torch_xla_donate.hlo.model import BITS, Alias, BufferDonor, HloModule, HloShape, brief

_T = TypeVar("_T")
# The recursion follows the nesting of tuples; torch_xla nests twice at most.
_MAX_TUPLE_DEPTH = 64

# The characters that a match of _BLANK starts with.
_BLANK_STARTS = frozenset(" \t\r/")
_BLANK = re.compile(r"(?:[ \t\r]+|/\*.*?\*/)*")
# The layout follows without a blank: the brace of `-> f32[8] {` opens a computation.
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([^\[\](){}]*)\](\{[^{}\"]*\})?")
_DIMENSION = re.compile(r"\s*(<=)?([0-9]{1,19})\s*\Z")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)
_KIND = re.compile(r"(may|must)-alias(?![\w.\-])", re.ASCII)
_NAME = re.compile(r"%?([^\s,({]+)")
_NUMBER = re.compile(r"[0-9]{1,18}(?![0-9])")
_MARK = re.compile(r'[,\s"{}()\[\]]|/\*')
# The pattern has no closing quote: re would retry a failed match from every quote.
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
FILE = re.compile(r"(?:([0-9]+)\.)?module_([0-9]+)\.(.+)\.txt")
STAGE = re.compile(r"(?:^|[._])(before_optimizations|after_optimizations)\Z")


def parse(text_or_path: str | os.PathLike[str]) -> HloModule:
    """Reads one module from HLO text, or from a file with HLO text.

    A `str` that starts with `HloModule`, or does not name a file, is text. An `os.PathLike` is a
    path. Only the header is read, which XLA writes in one line.

    Raises:
        ValueError: the text is not HLO. The message names the text found, its offset in characters,
            and the expected text.
        OSError: the file cannot be read.
    """
    if not isinstance(text_or_path, str):
        return parse_file(Path(text_or_path))
    if not text_or_path.lstrip().startswith("HloModule") and os.path.isfile(text_or_path):
        return parse_file(Path(text_or_path))
    parser = _Parser(text_or_path.lstrip(), "HLO text")
    if "HloModule" not in text_or_path:
        parser.fail("'HloModule', or the path of a file that exists")
    return parser.module()


def parse_shape(text: str) -> HloShape:
    """Reads one shape, such as `f32[8,4]{1,0}` or a tuple of them. Raises ValueError as `parse` does."""
    parser = _Parser(text, "shape")
    shape = parser.shape()
    parser.blank()
    if parser.position != len(text):
        parser.fail("the end of the shape")
    return shape


def parse_file(path: Path) -> HloModule:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        module = _Parser(next(filter(str.strip, file), ""), str(path)).module()
    dumped = FILE.fullmatch(path.name)
    if dumped is None:
        return replace(module, path=path)
    known = STAGE.search(dumped[3])
    stage = known[1] if known else dumped[3].removeprefix(f"{module.name}.")
    return replace(module, path=path, module_id=int(dumped[2]), stage=stage)


def _has(shape: HloShape, index: tuple[int, ...]) -> bool:
    try:
        shape.at(index)
    except IndexError:
        return False
    return True


class _Parser:
    """A recursive descent over HLO text. `position` only moves forward."""

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
        while self.eat(","):
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
                self.skip_value()
        if self.position < len(self.text) and self.text[self.position] != "\n":
            self.fail("',' or the end of the header line")
        if signature is None:
            self.fail("entry_computation_layout in the header")
        parameters, result = signature
        for offset, donor in donors:
            self.check_parameter(parameters, donor, offset)
        for offset, alias in aliases:
            self.check_parameter(parameters, alias.donor, offset)
            if not _has(result, alias.output_index):
                self.fail(f"an output index within the result {brief(result)}", offset)
        return HloModule(
            name=name,
            parameters=parameters,
            result=result,
            donors=tuple(donor for _, donor in donors),
            aliases=tuple(alias for _, alias in aliases),
            num_partitions=counts["num_partitions"],
            replica_count=counts["replica_count"],
        )

    def computation_layout(self) -> tuple[tuple[HloShape, ...], HloShape]:
        self.expect("{")
        parameters = self.shapes()
        self.expect("->")
        result = self.shape()
        self.expect("}")
        return parameters, result

    def shapes(self, depth: int = 0) -> tuple[HloShape, ...]:
        return tuple(shape for _, shape in self.list_of(lambda: self.shape(depth), ("(", ")")))

    def shape(self, depth: int = 0) -> HloShape:
        self.blank()
        if self.text.startswith("(", self.position):
            if depth == _MAX_TUPLE_DEPTH:
                self.fail(f"at most {_MAX_TUPLE_DEPTH} tuples in each other")
            return HloShape("tuple", elements=self.shapes(depth + 1))
        array = _ARRAY.match(self.text, self.position)
        if array is None:
            self.fail("a shape such as f32[8,4] or (f32[8,4], s32[])")
        dtype = array[1]
        if dtype not in BITS:
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
            self.skip_value(is_group=True)
            layout = self.text[array.end() : self.position]
        return HloShape(dtype, tuple(dims), tuple(dynamic), (), layout)

    def list_of(self, item: Callable[[], _T], brackets: tuple[str, str] = ("{", "}")) -> Iterator[tuple[int, _T]]:
        """Items between brackets, each with its offset."""
        opening, closing = brackets
        self.expect(opening)
        if self.eat(closing):
            return
        while True:
            self.blank()
            offset = self.position
            yield offset, item()
            if self.eat(closing):
                return
            self.expect(",", f"',' or {closing!r}")

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
        kind = self.take(_KIND, "may-alias or must-alias") if self.eat(",") else "may"
        self.expect(")")
        return Alias(output_index, number, index, kind)  # type: ignore[arg-type]

    def check_parameter(self, parameters: tuple[HloShape, ...], donor: BufferDonor, offset: int) -> None:
        number = donor.parameter_number
        if number >= len(parameters):
            self.fail(f"a parameter number below {len(parameters)}", offset)
        if not _has(parameters[number], donor.parameter_index):
            self.fail(f"an index within parameter {number}, {brief(parameters[number])}", offset)

    def skip_value(self, is_group: bool = False) -> None:
        """Goes to the end of a value: to a comma, a blank or a closing bracket that is in no bracket or string.

        is_group: the value begins with a bracket, and ends behind the one that closes it.
        """
        opened, depth = 0, 0
        while mark := _MARK.search(self.text, self.position):
            self.position = mark.start()
            if not depth and mark[0] in ", \t\n)}]":
                return
            if mark[0] == "/*":
                self.skip_to("*/", self.text.find("*/", self.position + 2))
            elif mark[0] == '"':
                string = _STRING.match(self.text, self.position)
                end = len(self.text) if string is None else string.end()
                self.skip_to('"', end if self.text.startswith('"', end) else -1)
            else:
                opened = opened if depth else self.position
                depth += (mark[0] in "{([") - (mark[0] in "})]")
                self.position += 1
                if is_group and not depth:
                    return
        self.position = len(self.text)
        if depth:
            self.fail(f"a closing bracket for {self.text[opened]!r} at offset {opened}")

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
