"""Reads HLO, and compiles it for TPUs: the inputs that a step donated, and the buffers that XLA reused. Public."""

from torch_xla_donate.hlo.dump import read_dump as read_dump
from torch_xla_donate.hlo.model import Alias as Alias
from torch_xla_donate.hlo.model import BufferDonor as BufferDonor
from torch_xla_donate.hlo.model import DumpedModule as DumpedModule
from torch_xla_donate.hlo.model import HloModule as HloModule
from torch_xla_donate.hlo.model import HloShape as HloShape
from torch_xla_donate.hlo.outcomes import DonorOutcome as DonorOutcome
from torch_xla_donate.hlo.outcomes import MemoryAnalysis as MemoryAnalysis
from torch_xla_donate.hlo.outcomes import donor_outcomes as donor_outcomes
from torch_xla_donate.hlo.parser import parse as parse
from torch_xla_donate.hlo.topology import TopologyModule as TopologyModule
from torch_xla_donate.hlo.topology import compile_for as compile_for

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
