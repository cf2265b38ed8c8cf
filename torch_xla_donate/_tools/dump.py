"""Summarises the modules of a dump, one at a time, in memory that does not grow with the size of their texts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from torch_xla_donate import hlo
from torch_xla_donate._tools.summary import SkippedFile, StepDonor, StepSummary
from torch_xla_donate.hlo.dump import ENTRY, copied_parameters
from torch_xla_donate.hlo.parser import FILE, STAGE

# Characters of a line that are read at once. Constants make lines of many megabytes.
_PIECE = 1 << 20
# The header of a module of 100,000 parameters takes less.
_LONGEST_HEADER = 1 << 24
_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*)")


@dataclasses.dataclass(frozen=True)
class ModuleFile:
    """One HLO text of a dump.

    Attributes:
        path: the file.
        module: the module of the header.
        copied: bytes that it copies, by number of the parameter.
        digest: equal for equal texts.
    """

    path: Path
    module: hlo.HloModule
    copied: dict[int, int]
    digest: bytes


@dataclasses.dataclass(frozen=True)
class DumpedStep:
    """A module of a dump.

    Attributes:
        summary: its summary.
        before: the file of its text before optimisation; None without one.
        signature: of its optimised text, or of the only text; see `signature_of`.
        digest: the digest of this text.
    """

    summary: StepSummary
    before: Path | None
    signature: int
    digest: bytes

    @classmethod
    def of(cls, before: ModuleFile | None, after: ModuleFile | None) -> DumpedStep:
        """The step of these texts. One of them may be None."""
        compiled = after or before
        assert compiled is not None, "a step has a text"
        path = None if before is None else before.path
        return cls(summarize(before, after), path, signature_of(compiled.module), compiled.digest)


class Dump:
    """The modules in a folder that XLA dumped to, in the order of their compilation.

    Iterate over it once. `len()` is the number of modules. `skipped` lists the files that could not be read, as far as
    the iteration has come.

    Raises:
        FileNotFoundError: the folder does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.skipped: list[SkippedFile] = []
        groups: dict[tuple[int, int], list[Path]] = {}
        for name in os.listdir(folder):
            dumped = FILE.fullmatch(name)
            if dumped and STAGE.search(dumped[3]):
                groups.setdefault((int(dumped[1] or 0), int(dumped[2])), []).append(folder / name)
        self._groups = [sorted(paths) for _, paths in sorted(groups.items())]

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[list[DumpedStep]]:
        """The modules of each number: one, or several if several processes dumped to the folder."""
        for paths in self._groups:
            found: dict[str, dict[str, ModuleFile]] = {}
            for path in paths:
                try:
                    read = read_module(path)
                except (OSError, ValueError) as error:
                    self.skipped.append(SkippedFile(str(path), str(error).removeprefix(f"{path}: ")))
                    continue
                stage = STAGE.search(path.stem)
                found.setdefault(read.module.name, {})[stage[1] if stage else ""] = read
            yield [
                DumpedStep.of(stages.get("before_optimizations"), stages.get("after_optimizations"))
                for stages in found.values()
            ]


def read_module(path: Path) -> ModuleFile:
    """Reads an HLO text line by line.

    Raises:
        ValueError: the file is not HLO text, or it ends before its entry computation does.
        OSError: it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    with open(path, encoding="utf-8", errors="replace") as file:
        header = file.readline(_LONGEST_HEADER)
        if not header.startswith("HloModule"):
            raise ValueError(f"it is not HLO text; it begins with {header[:24]!r}")
        if not header.endswith("\n"):
            raise ValueError("it is truncated: it ends in its first line")
        digest.update(header.encode())
        copied: dict[int, int] = {}
        for number, size in copied_parameters(_entry_lines(file, digest)):
            copied[number] = copied.get(number, 0) + size
    return ModuleFile(path, hlo.parse(header), copied, digest.digest())


def signature_of(module: hlo.HloModule) -> int:
    """Equal for equal names, parameters, results, aliases and donors.

    The header of a running executable does not have all attributes of the dump, such as the number of replicas.
    """
    return hash((module.name, module.parameters, module.result, module.aliases, module.donors))


def _entry_lines(file: TextIO, digest: hashlib.blake2b) -> Iterator[str]:
    """The lines of a text's entry computation. Reads on to the end of the text, and adds all of it to the digest."""
    is_inside, is_closed, is_start = False, False, True
    while piece := file.readline(_PIECE):
        digest.update(piece.encode())
        if is_start and ENTRY.match(piece):
            is_inside = True
        elif is_start and is_inside and piece.startswith("}"):
            is_inside, is_closed = False, True
        elif is_start and is_inside:
            yield piece
        is_start = piece.endswith("\n")
    if not is_closed:
        raise ValueError("it is truncated: its entry computation has no end")


def summarize(before: ModuleFile | None, after: ModuleFile | None) -> StepSummary:
    """A step from its texts. Donors are those of either text, because JAX writes aliases, and torch_xla donors."""
    texts = [file.module for file in (before, after) if file is not None]
    compiled = texts[-1]
    offered = {donor for text in texts for donor in (*text.donors, *(alias.donor for alias in text.aliases))}
    number_of = {hlo.BufferDonor(*place): number for number, place in enumerate(compiled.leaves)}
    whole = compiled
    outcomes: dict[hlo.BufferDonor, hlo.DonorOutcome] = {}
    if after is not None:
        # A compiler that changed the parameters leaves no shapes of the whole arrays.
        is_alike = before is not None and (
            list(before.module.leaves) == list(after.module.leaves)
            and len(list(before.module.result.leaves())) == len(list(after.module.result.leaves()))
        )
        whole = before.module if before is not None and is_alike else after.module
        outcomes = {outcome.donor: outcome for outcome in hlo.donor_outcomes(whole, after.module)}
    output_of = {index: number for number, (index, _) in enumerate(whole.result.leaves())}
    donors = []
    for donor in sorted(offered & number_of.keys(), key=number_of.__getitem__):
        shape, outcome, number = compiled.shape_of(donor), outcomes.get(donor), number_of[donor]
        output = None if outcome is None or outcome.output is None else output_of[outcome.output]
        reason = "" if output is not None else "the dump has no text after optimisation" if after is None else _DROPPED
        donors.append(
            StepDonor(
                parameter=number,
                array=str(shape),
                bytes=shape.padded_bytes,
                kind="unknown",
                output=output,
                reason=outcome.reason if outcome is not None else reason,
                copied_bytes=0 if after is None or output is None else after.copied.get(number, 0),
            )
        )
    return StepSummary(
        module=compiled.name,
        file="" if after is None else str(after.path),
        parameters=len(number_of),
        outputs=len(output_of),
        donors=tuple(donors),
        aliases=0 if after is None else len(after.module.aliases),
        memory=None if after is None else read_memory(after.path),
    )


_DROPPED = "the compiler dropped the donation"


def read_memory(after: Path) -> hlo.MemoryAnalysis | None:
    """The memory of a module, from the text of its buffer assignment beside it; None without one.

    It does not have the size of the generated code.
    """
    path = after.with_name(f"{after.stem}-buffer-assignment.txt")
    if not path.is_file():
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        return _allocations(iter(lambda: file.readline(_PIECE), ""))


def _allocations(lines: Iterator[str]) -> hlo.MemoryAnalysis | None:
    """Sums allocations as XLA's MemoryStats does (`xla/service/buffer_assignment.cc`)."""
    argument = output = alias = temp = 0
    any_found = False
    for line in lines:
        found = _ALLOCATION.match(line)
        if found is None:
            if any_found and not line.strip():
                break  # the values and live ranges that follow are long
            continue
        any_found = True
        size = int(found[1])
        # Shapes, between bars, may have any words.
        uses = re.sub(r"\|.*?\|", "", found[2])
        argument += size if "parameter " in uses else 0
        output += size if "maybe-live-out" in uses else 0
        alias += size if "parameter " in uses and "maybe-live-out" in uses else 0
        temp += size if "preallocated-temp" in uses else 0
    return hlo.MemoryAnalysis(argument, output, alias, temp, 0) if any_found else None
