"""Compiles, runs and describes graphs without a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torch_xla_donate import _C
from torch_xla_donate._host.interrupts import Switched
from torch_xla_donate._host.load import xlac
from torch_xla_donate._host.switches import OrderedParameters, compiling_graphs, donor_flags


class CompiledGraph(NamedTuple):
    """A graph that torch_xla has compiled and not run.

    hash: the key for `run_graph`; None if there is nothing to run.
    inputs: a tensor for each parameter.
    seeds: the parameters that are the random seed.
    preferred_outputs: for each donor the number of the output that takes it; None for other parameters.
    """

    hash: bytes | None
    inputs: list[torch.Tensor]
    seeds: list[int]
    preferred_outputs: list[int | None]


def compile_graph(
    outputs: Sequence[torch.Tensor], donors: Sequence[torch.Tensor], seed_buffer: int | None = None
) -> CompiledGraph:
    """Compiles the pending graph of some tensors with these donors, without running it.

    seed_buffer: the buffer of the seed, if its id does not identify it.
    """
    if not outputs:
        return CompiledGraph(None, [], [], [])
    ids, inputs = xlac()._get_tensors_xla_device_data_node(list(outputs))
    donors = list({_C.identity(donor)[1]: donor for donor in reversed(donors)}.values())[::-1]  # each buffer once
    with compiling_graphs(), donor_flags(donors), OrderedParameters(donors) as parameters:
        graph_hash = xlac()._get_graph_hash(list(outputs))
        xlac()._xla_warm_up_cache(list(outputs), [])
    order = parameters.order
    found = {_C.identity(tensor)[1]: (tensor_id, tensor) for tensor_id, tensor in zip(ids, inputs)}
    assert found.keys() == {buffer for buffer, _ in order}, "the hooks have not seen the graph"
    seed = xlac()._get_seed_info_id()
    seeds = [place for place, (buffer, _) in enumerate(order) if buffer == seed_buffer or found[buffer][0] == seed]
    inputs = [found[buffer][1] for buffer, _ in order]
    return CompiledGraph(graph_hash, inputs, seeds, [output for _, output in order])


def run_graph(graph_hash: bytes, inputs: list[Any], seed: int | None) -> list[torch.Tensor]:
    """Runs a graph of `compile_graph`. Advances the random seed, if the graph reads it, as the end of a step does."""
    if seed is not None:
        import torch_xla.core.xla_model as xm

        device = str(inputs[seed].device)
        # Pending work has drawn from the base seed, so this graph draws from the running one.
        xm.set_rng_state(xlac()._xla_get_rng_seed(), device)
        inputs[seed] = xlac()._get_base_seed_as_tensor(device)
    outputs = list(xlac()._run_cached_graph(graph_hash, inputs))
    if seed is not None:  # after the run, because it may find its graph evicted
        xm.set_rng_state((1012031 + xlac()._xla_get_rng_seed() * 7012063) % 2**64, device)
    return outputs


def is_evicted(error: RuntimeError) -> bool:
    """Whether torch_xla's cache has dropped the compiled graph."""
    return "kicked out of the LRU cache" in str(error)


def describe_graph(graph_hash: bytes) -> tuple[str, str]:
    """The optimised HLO of a graph of `compile_graph`, and XLA's statistics of its memory."""
    record = _C.GraphRecord(stops_runs=True)
    try:
        record.open()
        xlac()._run_cached_graph(graph_hash, [])
    except RuntimeError:
        for described in record.take():
            return described.text, described.memory
        raise
    finally:
        record.close()
    raise AssertionError("unreachable: the hook stops the run")


def hlo_text(outputs: Sequence[torch.Tensor], donors: Sequence[torch.Tensor]) -> tuple[str, list[int]]:
    """The HLO of the pending graph of some tensors with its donors, not optimised, and its parameters' buffers."""
    if not outputs:
        return "", []
    _, inputs = xlac()._get_tensors_xla_device_data_node(list(outputs))
    buffers = [_C.identity(tensor)[1] for tensor in inputs]
    donated = {_C.identity(tensor)[1] for tensor in donors}
    text = str(xlac()._get_xla_tensors_hlo(list(outputs)))
    # torch_xla omits the donors from this text. This is the place where XLA prints them.
    entries = ", ".join(f"({number}, {{}})" for number, buffer in enumerate(buffers) if buffer in donated)
    if entries:
        text = text.replace(
            ", entry_computation_layout=", f", buffer_donor={{ {entries} }}, entry_computation_layout=", 1
        )
    return text, buffers


def size_rule(platform: str) -> Switched[str | None]:
    """Orders parameters inside as for another platform: ``tpu`` or ``tpu before v4``."""
    return Switched(lambda: None, _C.force_size_rule, platform)


def parameter_order(
    outputs: Sequence[torch.Tensor], donors: Sequence[torch.Tensor], buffers: Sequence[int]
) -> list[int]:
    """The places of these parameters in the order that a step gives them, as in `compile_graph`."""
    with OrderedParameters(donors) as parameters:
        xlac()._get_graph_hash(list(outputs))
    place = {buffer: number for number, buffer in enumerate(buffers)}
    return [place[buffer] for buffer, _ in parameters.order]
