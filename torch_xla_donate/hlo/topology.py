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
from torch_xla_donate.hlo.model import HloModule
from torch_xla_donate.hlo.outcomes import DonorOutcome, MemoryAnalysis, donor_outcomes
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
_LARGEST = re.compile(r"1\. Size: (\S+)\n(?:.*\n)*?\s+Shape: (\S+)")
_OPERATOR = re.compile(r'1\. Size: .*\n\s+Operator: op_name="([^"]*)"')


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
    if "is_scheduled=true" in text[: text.find("\n")]:
        raise ValueError(
            f"module {before.name} is the text after optimisation, which XLA does not compile again. Give compile_for "
            f"the text before optimisation (module_*.before_optimizations.txt of a dump). {see('tpu')}"
        )
    partitions = _partitions(before, text)
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
    memory, plain = (
        MemoryAnalysis(**{f"{name}_bytes": size for name, size in answer[key].items()}) if key in answer else None
        for key in ("memory", "undonated")
    )
    assert memory is not None
    before = before.reordered(order or range(len(parameters)))
    return TopologyModule(topology, partitions, before, parse(compiled), memory, compiled, plain)


def _run(folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(_COMPILER), str(folder)]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
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
            return ValueError(
                f"topology {topology!r} does not exist ({text}). Use GENERATION:CHIPS, such as "
                f"{', '.join(TOPOLOGIES)}. {see('tpu')}"
            )
        case "devices":
            return ValueError(
                f"module {module} has {partitions} partitions, but topology {topology} has {answer['devices']} "
                f"devices. Choose a topology with at least {partitions} devices, or a smaller mesh. {see('tpu')}"
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
    largest, operator = _LARGEST.search(text), _OPERATOR.search(text)
    buffer = f" The largest buffer is {largest[2]} ({largest[1]})" if largest else ""
    buffer += f" of {operator[1]}." if operator and largest else "." if largest else ""
    return RuntimeError(
        f"module {module} does not fit on a device of {topology}: {exhausted[1]}.{buffer} Donate more, shard over more "
        f"devices, or recompute activations. {see('tpu')}\n\n{text}"
    )


def _partitions(module: HloModule, text: str) -> int:
    """The devices that the shardings of a module count; torch_xla's texts give the number nowhere else."""
    tiles = {found[1] for found in _SHARDING.finditer(text)}
    return max([module.num_partitions, *(math.prod(map(int, tile.split(","))) for tile in tiles)])
