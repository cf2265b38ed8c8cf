"""Reads the folders that XLA dumps to.

The names were seen with torch_xla 2.9.0 on CPU. Names that a CPU never writes come from XLA's
printer and dumper (`xla/hlo/ir/hlo_module.cc`, `xla/service/dump.cc`):

- A module leaves `module_0001.SyncTensorsGraph.4.before_optimizations.txt` and
  `module_0001.SyncTensorsGraph.4.cpu_after_optimizations.txt`. Other backends write another prefix
  before `after_optimizations` (`sm_8.0_gpu_`). The number counts the modules of one process, in
  four digits or more. `--xla_dump_include_timestamp` puts `<microseconds>.` in front of both. XLA
  omits a module's name that would make the file name longer than 255 characters.
- The files `...-buffer-assignment.txt` and `...-memory-usage-report.txt` beside them are not HLO.
- The first line holds everything that this package reads. XLA prints `replica_count` and
  `num_partitions` only when they are not 1, and an attribute only when it is not empty.
- Before optimisation the shapes of an SPMD module are global. After it they are those of one
  device. The numbers of the parameters stay.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from torch_xla_donate.hlo.model import DumpedModule, HloModule, HloShape
from torch_xla_donate.hlo.parser import FILE, STAGE, parse_file, parse_shape

_HOW_TO_DUMP = 'Set XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text" before torch_xla starts.'


def read_dump(folder: str | os.PathLike[str]) -> tuple[DumpedModule, ...]:
    """Reads the modules in a folder that XLA dumped to, in the order of their compilation.

    It reads only the texts before and after optimisation, and pairs them by the module's number and
    the name in the header. XLA numbers the modules of each process from 0, so give each process a
    separate folder.

    Raises:
        FileNotFoundError: the folder is missing or has no such file. The text gives the flags to set.
        ValueError: as for `parse`.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder. {_HOW_TO_DUMP}")
    found = []
    for files in texts_in(folder):
        pairs: dict[str, dict[str, HloModule]] = {}
        for stage, path in files:
            module = parse_file(path)
            pairs.setdefault(module.name, {})[stage] = module
        found += [
            DumpedModule(pairs[name].get("before_optimizations"), pairs[name].get("after_optimizations"))
            for name in sorted(pairs)
        ]
    if not found:
        raise FileNotFoundError(
            f"folder {folder} has {len(os.listdir(folder))} files, but no module_*.before_optimizations.txt and no"
            f" module_*after_optimizations.txt. {_HOW_TO_DUMP}"
        )
    return tuple(found)


def texts_in(folder: Path) -> list[list[tuple[str, Path]]]:
    """The (stage, path) of the texts before and after optimisation in a folder, by number of the module, in order.

    Several processes that dumped to one folder have modules of the same numbers.
    """
    found: dict[tuple[int, int], list[tuple[str, Path]]] = {}
    for name in sorted(os.listdir(folder)):
        dumped = FILE.fullmatch(name)
        stage = dumped and STAGE.search(dumped[3])
        if dumped and stage:
            found.setdefault((int(dumped[1] or 0), int(dumped[2])), []).append((stage[1], folder / name))
    return [found[key] for key in sorted(found)]


ENTRY = re.compile(r"^ENTRY ", re.MULTILINE)  # begins the entry computation
_PARAMETER = re.compile(r"\s*%?([\w.-]+) = .* parameter\((\d+)\)")
_ELEMENT = re.compile(r"\s*%?([\w.-]+) = .* get-tuple-element\((?:\S+ )?%?([\w.-]+)\), index=(\d+)")
_COPY = re.compile(r" = (\S+) copy\((?:\S+ )?%?([\w.-]+)\)")


def copies(text: str) -> list[tuple[HloShape, str]]:
    """The copies of the entry computation of an optimised text: the shape, and the name of what is copied."""
    return [(parse_shape(found[1]), found[2]) for line in _entry(text) if (found := _COPY.search(line))]


def copied_bytes(text: str) -> dict[int, int]:
    """The bytes of the parameters that the entry computation of an optimised text copies, by number.

    If the only parameter is a tuple, the number is that of its element.
    """
    parameters: dict[str, int] = {}
    elements: list[tuple[str, str, int]] = []
    for line in _entry(text):
        if found := _PARAMETER.match(line):
            parameters[found[1]] = int(found[2])
        elif found := _ELEMENT.match(line):
            elements.append((found[1], found[2], int(found[3])))
    numbers = dict(parameters)
    numbers.update((name, index) for name, source, index in elements if source in parameters and len(parameters) == 1)
    copied: dict[int, int] = {}
    for shape, source in copies(text):
        if source in numbers:
            copied[numbers[source]] = copied.get(numbers[source], 0) + shape.bytes
    return copied


def _entry(text: str) -> list[str]:
    found = ENTRY.search(text)
    lines = text[found.start() :].splitlines() if found is not None else []
    return [line.partition(", metadata=")[0] for line in lines]  # which quotes the program
