"""Watches a function during a trace for a replay or for `lower`."""

from torch_xla_donate._trace.host_reads import HostReads, Refusal, host_reads_refused, tensors_of
from torch_xla_donate._trace.recorder import (
    Recorder,
    Restoring,
    TensorSnapshot,
    as_one,
    current_watcher,
    give_back,
    state_of,
)
