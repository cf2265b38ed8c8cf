"""Public reading of HLO dumps: what was donated, and what XLA reused."""

from torch_xla_donate._hlo import Alias as Alias
from torch_xla_donate._hlo import BufferDonor as BufferDonor
from torch_xla_donate._hlo import DumpedModule as DumpedModule
from torch_xla_donate._hlo import HloModule as HloModule
from torch_xla_donate._hlo import HloShape as HloShape
from torch_xla_donate._hlo import parse as parse
from torch_xla_donate._hlo import read_dump as read_dump

__all__ = [
    "Alias",
    "BufferDonor",
    "DumpedModule",
    "HloModule",
    "HloShape",
    "parse",
    "read_dump",
]
