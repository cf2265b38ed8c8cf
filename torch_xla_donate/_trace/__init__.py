"""Watches a function during a trace for a replay or for `lower`."""

from torch_xla_donate._trace.host_reads import HostReads, Refusal, host_reads_refused
from torch_xla_donate._trace.recorder import Recorder, Restoring
from torch_xla_donate._trace.refusals import impure, not_lowerable
from torch_xla_donate._trace.snapshot import TensorSnapshot
from torch_xla_donate._trace.watcher import as_one, current_watcher, watched
