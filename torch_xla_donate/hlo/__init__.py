"""Reads HLO dumps: the inputs that a step donated, and the buffers that XLA reused. Public."""

from torch_xla_donate.hlo.dump import read_dump as read_dump
from torch_xla_donate.hlo.model import Alias as Alias
from torch_xla_donate.hlo.model import BufferDonor as BufferDonor
from torch_xla_donate.hlo.model import DumpedModule as DumpedModule
from torch_xla_donate.hlo.model import HloModule as HloModule
from torch_xla_donate.hlo.model import HloShape as HloShape
from torch_xla_donate.hlo.parser import parse as parse

__all__ = [
    "Alias",
    "BufferDonor",
    "DumpedModule",
    "HloModule",
    "HloShape",
    "parse",
    "read_dump",
]
