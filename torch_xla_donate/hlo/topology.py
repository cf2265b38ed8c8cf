"""Compiles modules for TPUs that are not there, or for CPU: what XLA does with a step's donors, and its memory."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_xla_donate._errors import see
from torch_xla_donate._text import plural
from torch_xla_donate.hlo.model import HloModule
from torch_xla_donate.hlo.outcomes import DonorOutcome, MemoryAnalysis, donor_outcomes, read_statistics
from torch_xla_donate.hlo.parser import parse

# Names that libtpu 0.0.21 accepts, for messages and for the docs.
TOPOLOGIES = (
    *("v4:2x2x1", "v4:2x2x4", "v4:2x4x4"),
    *("v5e:1x1", "v5e:2x2", "v5e:4x4", "v5e:4x8", "v5e:16x16"),
    *("v5p:2x2x1", "v5p:2x2x4", "v5p:4x4x8"),
    *("v6e:1x1", "v6e:2x2", "v6e:4x4", "v6e:4x8", "v6e:16x16"),
)
_COMPILER = Path(__file__).with_name("_tpu_compiler.py")
_SHARDING = re.compile(r"sharding=\{[^\n]*?devices=\[([0-9,]+)\]")
# An entry of the compiler's lists of buffers.
_BUFFER = re.compile(
    r"""^\s*\d+\. Size: (?P<size>(?P<count>[\d.]+)(?P<unit>[KMG]?)\S*)\n"""
    r"""(?:\s+Operator: op_name="(?P<operator>[^"]*)".*\n)?"""
    r"""(?:(?!\s*\d+\. Size:).*\n)*?\s+Shape: (?P<shape>\S+)""",
    re.MULTILINE,
)


@dataclass(frozen=True)
class TopologyModule:
    """A module compiled for a topology. It cannot be run.

    topology: the name, such as `v6e:4x8`, or `cpu`.
    num_devices: the devices that the module is compiled for, one for each partition.
    before, after: the module before and after optimisation.
    memory: bytes on one device, padded as the platform pads them.
    undonated: the same without donors and aliases; None if that was not asked for, or does not fit on the device.
    """

    topology: str
    num_devices: int
    before: HloModule
    after: HloModule
    memory: MemoryAnalysis
    _text: str = field(repr=False)
    undonated: MemoryAnalysis | None = None

    def as_text(self) -> str:
        """HLO after optimisation; `input_output_alias` lists the parameters whose memory outputs reuse."""
        return self._text

    @functools.cached_property
    def donors(self) -> tuple[DonorOutcome, ...]:
        """The outcome of each donor, in the order of the parameters."""
        return donor_outcomes(self.before, self.after)


def size_rule_of(topology: str) -> str:
    """The rule of sizes of a topology's devices, from its name. Raises ValueError for what is not such a name."""
    if not isinstance(topology, str) or not re.fullmatch(r"[^:]+:[^:]+", topology):
        raise ValueError(_no_topology(topology))
    return "tpu before v4" if topology.startswith(("v2:", "v3:")) else "tpu"


def compile_for(text_or_path: str | os.PathLike[str], topology: str, *, undonated: bool = False) -> TopologyModule:
    """Compiles a module with the TPU compiler, for a TPU that need not be there, or with jax's compiler for CPU.

    Donors, aliases and shardings of the module are kept. A sharded module is compiled for as many devices of the
    topology as it has partitions. Needs the packages of ``pip install "torch_xla_donate[tpu]"``: jax, jaxlib and
    libtpu. They run in a separate process.

    Args:
        text_or_path: HLO before optimisation, as for `parse`: of this package, of torch_xla or of JAX.
        topology: generation and chips, such as ``v5e:4x8``, ``v6e:2x2`` or ``v4:2x2x1``. ``cpu`` compiles for this
            machine. It needs jax and jaxlib only, and ignores ``XLA_FLAGS``.
        undonated: compile the module a second time, without donors and aliases, for `TopologyModule.undonated`.

    Raises:
        ImportError: a package is missing.
        ValueError: the topology does not exist or has fewer devices than the module has partitions; or the text is not
            HLO before optimisation.
        RuntimeError: the compiler failed, for instance because a device has too little memory.
        OSError: the file cannot be read.
    """
    before = parse(text_or_path)
    is_path = before.path is not None or not isinstance(text_or_path, str)
    text = Path(text_or_path).read_text(encoding="utf-8") if is_path else str(text_or_path)
    return compile_module(before, text, topology, (), undonated=undonated)


def compile_module(
    before: HloModule, text: str, topology: str, order: Sequence[int], *, undonated: bool = False
) -> TopologyModule:
    """As `compile_for`. order: the parameters in the order that the module should have; empty to keep theirs."""
    if topology != "cpu":
        size_rule_of(topology)  # raises for what is not a topology's name
    if "is_scheduled=true" in text.lstrip().partition("\n")[0]:
        raise ValueError(
            f"module {before.name} is the text after optimisation, which XLA does not compile again. Give compile_for "
            f"the text before optimisation (module_*.before_optimizations.txt of a dump). {see('tpu')}"
        )
    partitions = _partitions(before, text)
    if before.replica_count > 1:
        raise ValueError(
            f"module {before.name} has {before.replica_count} replicas, one for each process or thread of its program. "
            f"Give compile_for a module without replicas, such as one compiled under SPMD. {see('tpu')}"
        )
    parameters = {place: number for number, place in enumerate(before.leaves)}
    outputs = {index: number for number, (index, _) in enumerate(before.result.leaves())}
    request = {
        "topology": topology,
        "partitions": partitions,
        "donors": [parameters[donor.parameter_number, donor.parameter_index] for donor in before.donors],
        "aliases": [
            (parameters[alias.parameter_number, alias.parameter_index], outputs[alias.output_index])
            for alias in before.aliases
        ],
        "order": list(order),
        "shardy": "xla.sdy." in text,  # JAX's way to write shardings
        "undonated": undonated,
    }
    with tempfile.TemporaryDirectory(prefix="torch_xla_donate_") as scratch:
        folder = Path(scratch)
        (folder / "module.hlo").write_text(text, encoding="utf-8")
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        answer = _run(folder)
        if "memory" not in answer:
            raise _error(answer, before.name, topology, partitions)
        compiled = (folder / "compiled.hlo").read_text(encoding="utf-8")
    memory, plain = (read_statistics(answer[key]) if key in answer else None for key in ("memory", "undonated"))
    assert memory is not None
    before = before.reordered(order or range(len(parameters)))
    return TopologyModule(topology, partitions, before, parse(compiled), memory, compiled, plain)


def _run(folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(_COMPILER), str(folder)]
    # The flags of this process may be unknown to jaxlib, or dump the module among those of the program.
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    child = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=env)
    answer = folder / "answer.json"
    if child.returncode == 0 and answer.exists():
        read: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return read
    last = [line for line in child.stderr.splitlines() if line.strip()][-1:]
    return {"kind": "crash", "code": child.returncode, "error": "".join(last)}


def _error(answer: dict[str, Any], module: str, topology: str, partitions: int) -> Exception:
    text = str(answer.get("error", ""))
    match answer["kind"]:
        case "missing":
            return ImportError(
                f"compiling for {topology} needs the compiler ({text}). Install it with "
                f'pip install "torch_xla_donate[tpu]" on Python 3.11 or newer. {see("tpu")}'
            )
        case "topology":
            return ValueError(_no_topology(topology, f" ({text})"))
        case "devices":
            return ValueError(
                f"module {module} has {partitions} partitions, but topology {topology} has "
                f"{plural(answer['devices'], 'device')}. Choose a topology with at least {partitions} devices, "
                f"or a smaller mesh. {see('tpu')}"
            )
        case "text":
            return ValueError(f"module {module} is not HLO that XLA can read: {text}. {see('tpu')}")
        case "crash":
            return RuntimeError(
                f"the compiler ended with exit code {answer['code']} for module {module} and {topology}: {text}. "
                f"Compile a smaller part of the step to find the operation. {see('tpu')}"
            )
    exhausted = re.search(r"Ran out of memory in memory space hbm\. (Used \S+ of \S+ hbm)", text)
    if exhausted is None:
        return RuntimeError(f"the compiler refused module {module} for {topology}: {text}. {see('tpu')}")
    uses = ", ".join(f"{found[1]} {found[2]}" for found in re.finditer(r"^\s+(program|arguments) +(\S+)", text, re.M))
    buffers, buffer = list(_BUFFER.finditer(text)), ""
    if buffers:
        largest = max(buffers, key=lambda one: float(one["count"]) * 1024 ** " KMG".index(one["unit"] or " "))
        operator = f" of {largest['operator']}" if largest["operator"] else ""
        buffer = f" The largest buffer of the program is {largest['shape']} ({largest['size']}){operator}."
    used = f"{exhausted[1]} ({uses})." if uses else f"{exhausted[1]}."
    return RuntimeError(
        f"module {module} does not fit on a device of {topology}: {used}{buffer} Donate more, shard over more devices, "
        f"or recompute activations. {see('tpu')}\n\n{text}"
    )


def _no_topology(topology: object, details: str = "") -> str:
    return (
        f"topology {topology!r} does not exist{details}. Use GENERATION:CHIPS, such as {', '.join(TOPOLOGIES)}. "
        f"{see('tpu')}"
    )


def _partitions(module: HloModule, text: str) -> int:
    """The devices that the shardings of a module count; torch_xla's texts give the number nowhere else."""
    tiles = {found[1] for found in _SHARDING.finditer(text)}
    return max([module.num_partitions, *(math.prod(map(int, tile.split(","))) for tile in tiles)])
