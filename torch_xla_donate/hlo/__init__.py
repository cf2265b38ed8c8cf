"""Reads HLO, and compiles it for TPUs: the inputs that a step donated, and the buffers that XLA reused. Public."""

from typing import TYPE_CHECKING

from torch_xla_donate import _lazily

if TYPE_CHECKING:
    from torch_xla_donate.hlo.dump import read_dump
    from torch_xla_donate.hlo.model import Alias, BufferDonor, DumpedModule, HloModule, HloShape
    from torch_xla_donate.hlo.outcomes import DonorOutcome, MemoryAnalysis, donor_outcomes
    from torch_xla_donate.hlo.parser import parse
    from torch_xla_donate.hlo.topology import TopologyModule, compile_for

__all__ = [
    "Alias",
    "BufferDonor",
    "DonorOutcome",
    "DumpedModule",
    "HloModule",
    "HloShape",
    "MemoryAnalysis",
    "TopologyModule",
    "compile_for",
    "donor_outcomes",
    "parse",
    "read_dump",
]

__getattr__, __dir__ = _lazily.names_of(
    __name__,
    {
        "dump": ["read_dump"],
        "model": ["Alias", "BufferDonor", "DumpedModule", "HloModule", "HloShape"],
        "outcomes": ["DonorOutcome", "MemoryAnalysis", "donor_outcomes"],
        "parser": ["parse"],
        "topology": ["TopologyModule", "compile_for"],
    },
)
