"""The columns "on v6e" of the examples: what the TPU compiler makes of the steps that a run on CPU has dumped."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from torch_xla_donate import hlo

MISSING = "needs pip install torch_xla_donate[tpu]"
# Name, shape and operation of each instruction, and its first operand.
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(\S+) = (\([^=]*?\)|\S+) ([\w-]+)\((?:[^%)]*%)?([\w.-]*)", re.MULTILINE)
# Vector and scalar memory. XLA moves arrays there to work on them, with donation and without.
_FAST_MEMORY = re.compile(r"S\([0-9]+\)")


@dataclass(frozen=True)
class Reuse:
    """The result of a compiler for a step.

    copies: how many arrays the entry computation copies within main memory. Scalars do not count.
    written_back: how many arrays it moves from a TPU's vector memory to main memory.
    """

    aliases: int
    aliased_bytes: int
    copies: int
    written_back: int


def on_cpu(step: hlo.DumpedModule) -> Reuse:
    text = step.after.path.read_text(encoding="utf-8")
    return Reuse(len(step.aliases), step.aliased_bytes, *count_copies(text))


def on_tpu(step: hlo.DumpedModule) -> Reuse | None:
    """None if the TPU compiler is not installed."""
    return _compile(step.before.path.read_text(encoding="utf-8"))


@functools.cache
def _compile(text: str) -> Reuse | None:
    """Of a text, as several runs may have the same step."""
    try:
        compiled = hlo.compile_for(text, "v6e:1x1")
    except ImportError:
        return None
    return Reuse(len(compiled.after.aliases), compiled.after.aliased_bytes, *count_copies(compiled.as_text()))


def count_copies(text: str) -> tuple[int, int]:
    """`copies` and `written_back` of `Reuse`."""
    entry = text[re.search(r"^ENTRY ", text, re.MULTILINE).start() :]
    instructions = _INSTRUCTION.findall(entry[: entry.find("\n}")])
    shapes = {name: shape for name, shape, _, _ in instructions}
    counts = {(False, False): 0, (True, False): 0}  # by whether source and target are in fast memory
    for _, shape, operation, operand in instructions:
        if operation == "copy-start":
            target, source, *_ = shape[1:].split(", ")
        elif operation == "copy":
            target, source = shape, shapes.get(operand, "")
        else:
            continue
        kind = (bool(_FAST_MEMORY.search(source)), bool(_FAST_MEMORY.search(target)))
        if kind in counts and "[]" not in target:
            counts[kind] += 1
    return counts[False, False], counts[True, False]


def print_reuse(console: Console, steps: Mapping[str, hlo.DumpedModule]) -> dict[str, dict[str, object]]:
    """Prints a table of the steps, each with its name; what the compilers made of each, for a file of results."""
    table = Table(title="Donors of a step, and copies of arrays", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("donors", "aliased on CPU", "on v6e", "copies on CPU", "on v6e", "written back"):
        table.add_column(column, justify="right")
    found: dict[str, dict[str, object]] = {}
    for name, step in steps.items():
        cpu, tpu = on_cpu(step), on_tpu(step)
        found[name] = {"cpu": asdict(cpu), "v6e": None if tpu is None else asdict(tpu)}
        on_v6e = (MISSING, "", "") if tpu is None else (str(tpu.aliases), str(tpu.copies), str(tpu.written_back))
        table.add_row(name, str(len(step.donors)), str(cpu.aliases), on_v6e[0], str(cpu.copies), *on_v6e[1:])
    console.print(table)
    return found
