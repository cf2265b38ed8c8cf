"""The shapes, donors and aliases in a module's HLO text, as frozen dataclasses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

# Bits of one element. The keys are the names in XLA's xla_data.proto, in lower case as in HLO text.
BITS = {
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
_ELEMENT_BITS = re.compile(r"E\(([0-9]{1,4})\)")
_MINOR_TO_MAJOR = re.compile(r"\{([0-9,]*)")
# The tiles of a layout, outermost first: T(8,128)(2,1).
_TILES = re.compile(r"T((?:\([0-9,]*\))+)")


@dataclass(frozen=True, slots=True)
class HloShape:
    """The shape of an array, a token, an opaque value or a tuple.

    dtype: XLA's name (`f32`, `bf16`, `pred`, `s64`, `u4`, `f8e4m3fn`, `c64`, `token`, `opaque`),
        or `tuple`.
    dims: the sizes. A dynamic dimension (`<=8`) has its bound.
    dynamic: the numbers of the dynamic dimensions.
    elements: the shapes in a tuple.
    layout: as written, braces included (`{1,0:T(8,128)S(1)}`). Comparisons ignore it.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    dynamic: tuple[int, ...] = ()
    elements: tuple[HloShape, ...] = ()
    layout: str = field(default="", compare=False)

    @property
    def is_tuple(self) -> bool:
        """True for a tuple, also for the empty one."""
        return self.dtype == "tuple"

    @property
    def bytes(self) -> int:
        """Bytes of the elements, as XLA's `ShapeUtil::ByteSizeOfElements` counts them.

        `pred` takes 1 byte. An element of a type below 8 bits takes a whole byte. If the layout
        packs the elements (`E(4)`), the sum of their bits is rounded up to bytes. A dynamic
        dimension counts with its bound. A tuple counts with the sum of its elements, without the
        table of pointers. `token` and `opaque` count as 0. `padded_bytes` adds the padding to a TPU's tiles.
        """
        if self.is_tuple:
            return sum(element.bytes for element in self.elements)
        packed = _ELEMENT_BITS.search(self.layout)
        bits = int(packed[1]) if packed else 0
        # XLA writes E(0) for a layout that is not packed.
        if bits:
            return (math.prod(self.dims) * bits + 7) // 8
        return math.prod(self.dims) * ((BITS[self.dtype] + 7) // 8)

    @property
    def padded_bytes(self) -> int:
        """Bytes in a device's memory: the array padded to the tiles of its layout; `bytes` if there are none.

        Each tile pads the most minor dimensions to multiples of its sizes, and the next tile divides it further (XLA's
        tiled layouts, openxla.org/xla/tiled_layout).
        """
        if self.is_tuple:
            return sum(element.padded_bytes for element in self.elements)
        tiles = _TILES.search(self.layout)
        if tiles is None or 0 in self.dims:
            return self.bytes
        order = _MINOR_TO_MAJOR.match(self.layout)
        minor_to_major = [int(number) for number in order[1].split(",") if number] if order else []
        sizes = [self.dims[number] for number in reversed(minor_to_major)]
        for tile in tiles[1][1:-1].split(")("):
            steps = [int(size) for size in tile.split(",") if size]
            sizes = [1] * (len(steps) - len(sizes)) + sizes
            outer = len(sizes) - len(steps)
            sizes = [*sizes[:outer], *(-(-size // step) for size, step in zip(sizes[outer:], steps)), *steps]
        return HloShape(self.dtype, tuple(sizes), layout=self.layout).bytes

    def at(self, index: tuple[int, ...]) -> HloShape:
        """The shape at a tuple index; `()` is the shape itself. Raises IndexError if there is none."""
        shape = self
        for step in index:
            if not 0 <= step < len(shape.elements):
                raise IndexError(f"{brief(self)} has no element {_index_text(index)}")
            shape = shape.elements[step]
        return shape

    def leaves(self) -> Iterator[tuple[tuple[int, ...], HloShape]]:
        """The index and the shape of each part that is not a tuple, in order."""
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

    parameter_index is `()` for a plain parameter. If torch_xla wrapped all parameters in one tuple,
    it is the place in that tuple.
    """

    parameter_number: int
    parameter_index: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"({self.parameter_number}, {_index_text(self.parameter_index)})"


@dataclass(frozen=True, slots=True, order=True)
class Alias:
    """An output that lives in an input's buffer: `{0}: (3, {1}, may-alias)`.

    kind: if the caller did not donate the buffer, XLA copies it with `may` and fails with `must`.
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
    donors: in a text after optimisation, only the donors that found no output.
    num_partitions, replica_count: 1 if the text does not give them. With more than one partition
        the shapes and bytes after optimisation are those of one device.
    path: the file that the module was read from, or None.
    module_id, stage: from the name of a dump file, else None. stage is `before_optimizations`,
        `after_optimizations`, or the part of the file name that follows the module's name.
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

    @property
    def results(self) -> tuple[HloShape, ...]:
        """The outputs: the elements of the result if it is a tuple, else the result."""
        return self.result.elements if self.result.is_tuple else (self.result,)

    @property
    def leaves(self) -> dict[tuple[int, tuple[int, ...]], HloShape]:
        """Every input buffer: (parameter_number, parameter_index) -> shape."""
        return {
            (number, index): leaf
            for number, parameter in enumerate(self.parameters)
            for index, leaf in parameter.leaves()
        }

    def reordered(self, order: Sequence[int]) -> HloModule:
        """The module with a parameter for each array. Parameter i is the array that was number `order[i]`."""
        leaves = list(self.leaves.items())
        new = {leaves[number][0]: place for place, number in enumerate(order)}
        return HloModule(
            name=self.name,
            parameters=tuple(leaves[number][1] for number in order),
            result=self.result,
            donors=tuple(sorted(BufferDonor(new[one.parameter_number, one.parameter_index]) for one in self.donors)),
            aliases=tuple(
                Alias(one.output_index, new[one.parameter_number, one.parameter_index], kind=one.kind)
                for one in self.aliases
            ),
            num_partitions=self.num_partitions,
            replica_count=self.replica_count,
        )

    def shape_of(self, buffer: BufferDonor | Alias) -> HloShape:
        """The shape of the input that a donor or an alias of this module names."""
        return self.parameters[buffer.parameter_number].at(buffer.parameter_index)

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donors in this text; see `HloShape.bytes`."""
        return sum(self.shape_of(donor).bytes for donor in self.donors)

    @property
    def aliased_bytes(self) -> int:
        """Bytes of the inputs whose buffers hold outputs; see `HloShape.bytes`."""
        return sum(self.shape_of(alias).bytes for alias in self.aliases)


@dataclass(frozen=True, slots=True)
class DumpedModule:
    """A dumped module: its text before and after XLA's optimisation.

    One of the two is None if its file is missing. `after` is missing when compiling failed.
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
        """The inputs that the step offered."""
        if self.before is not None:
            return self.before.donors
        # Each donor becomes an alias or stays a donor, so the two together are the donors offered.
        compiled = self._compiled
        return tuple(sorted({*compiled.donors, *(alias.donor for alias in compiled.aliases)}))

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """The outputs that live in an input's buffer; empty if `after` is None."""
        return () if self.after is None else self.after.aliases

    @property
    def unused_donors(self) -> tuple[BufferDonor, ...]:
        """The donors that found no output; all of them if `after` is None."""
        used = {alias.donor for alias in self.aliases}
        return tuple(donor for donor in self.donors if donor not in used)

    def shape_of(self, buffer: BufferDonor | Alias) -> HloShape:
        """The shape of an input on one device; the global shape if `after` is None."""
        return self._compiled.shape_of(buffer)

    @property
    def donated_bytes(self) -> int:
        """Bytes of the donors, on one device; see `HloShape.bytes`."""
        return sum(self.shape_of(donor).bytes for donor in self.donors)

    @property
    def aliased_bytes(self) -> int:
        """Bytes of the inputs whose buffers hold outputs, on one device; see `HloShape.bytes`."""
        return 0 if self.after is None else self.after.aliased_bytes

    @property
    def _compiled(self) -> HloModule:
        module = self.after or self.before
        if module is None:
            raise ValueError("DumpedModule has neither before nor after. Give it at least one HloModule.")
        return module


def _index_text(index: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, index)) + "}"


def brief(shape: HloShape) -> str:
    text = str(shape)
    return text if len(text) <= 80 else f"a tuple of {len(shape.elements)} elements"
