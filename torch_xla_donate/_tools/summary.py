"""The data that `run`, `verify` and `inspect` collect about the steps of a program, which `--json` writes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from torch_xla_donate.hlo import MemoryAnalysis

Kind = Literal["marked", "automatic", "torch_xla", "unknown"]


@dataclasses.dataclass(frozen=True)
class StepDonor:
    """A donor of a step.

    Attributes:
        parameter: its number among the input arrays of the step's HLO; -1 if the package did not offer it to XLA.
        array: element type and shape on one device, in XLA's notation: ``f32[8,4]``.
        bytes: bytes on one device.
        kind: ``marked`` by the program, ``automatic`` by `auto_donate`, ``torch_xla`` for its in-place updates, or
            ``unknown``, as in a dump of another program.
        name: name of the leaf; empty if unknown.
        where: ``file:line`` of the mark; empty if unknown.
        output: number of the output that takes the memory; None if none does.
        reason: why no output takes it; empty if one does.
        copied_bytes: bytes that XLA copies although an output takes the memory.
    """

    parameter: int
    array: str
    bytes: int
    kind: Kind
    name: str = ""
    where: str = ""
    output: int | None = None
    reason: str = ""
    copied_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class StepSummary:
    """A distinct step: one compiled module.

    Attributes:
        module: the HLO module's name, such as ``SyncTensorsGraph.12``.
        file: path of its text after optimisation; empty without a dump.
        parameters: the number of input arrays.
        outputs: the number of output arrays.
        donors: its donors with their outcome.
        aliases: the number of outputs that reuse an input.
        memory: the bytes of a run on one device, as XLA plans them; None if unknown.
        undonated: the same without donation; None if unknown.
        executed: how often the program ran it; None if unknown.
        sites: ``file:line`` of the syncs that ran it, the most frequent first.
        topology: the TPU topology that it was compiled for; empty for the machine of the dump.
        on_topology: the same step on a TPU topology; None if that was not asked for.
    """

    module: str
    file: str
    parameters: int
    outputs: int
    donors: tuple[StepDonor, ...]
    aliases: int
    memory: MemoryAnalysis | None = None
    undonated: MemoryAnalysis | None = None
    executed: int | None = None
    sites: tuple[str, ...] = ()
    topology: str = ""
    on_topology: StepSummary | None = None

    @property
    def donated_bytes(self) -> int:
        """Bytes on one device of the donors that an output reuses."""
        return sum(donor.bytes for donor in self.donors if donor.output is not None)

    @property
    def offered_bytes(self) -> int:
        """Bytes on one device of all donors."""
        return sum(donor.bytes for donor in self.donors)


@dataclasses.dataclass(frozen=True)
class SkippedFile:
    """A file of a dump that could not be read, with the reason."""

    file: str
    reason: str


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """The steps of a program or of a dump, in the order of their compilation.

    Attributes:
        source: the command or the folder.
        steps: the distinct steps.
        skipped: files that could not be read.
        exit_code: of the program; None for a dump.
    """

    source: str
    steps: tuple[StepSummary, ...]
    skipped: tuple[SkippedFile, ...] = ()
    exit_code: int | None = None

    @property
    def offered_bytes(self) -> int:
        """Bytes on one device of all donors of the distinct steps."""
        return sum(step.offered_bytes for step in self.steps)

    @property
    def donated_fraction(self) -> float:
        """Donated bytes as a fraction of the bytes offered, over the distinct steps; 0.0 if none was offered."""
        offered = self.offered_bytes
        return sum(step.donated_bytes for step in self.steps) / offered if offered else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {**dataclasses.asdict(self), "donated_fraction": self.donated_fraction}
