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
    ids: for each parameter the id of the tensor that the graph reads; negative for other data.
    seeds: the parameters that are random seeds.
    preferred_outputs: for each donor the number of the output that takes it; None for other parameters.
    """

    hash: bytes | None
    inputs: list[torch.Tensor]
    ids: list[int]
    seeds: list[int]
    preferred_outputs: list[int | None]


def compile_graph(
    outputs: Sequence[torch.Tensor], donors: Sequence[torch.Tensor], seed_buffer: int | None = None
) -> CompiledGraph:
    """Compiles the pending graph of some tensors with these donors, without running it.

    seed_buffer: the buffer of the seed, if its id does not identify it.
    """
    if not outputs:
        return CompiledGraph(None, [], [], [], [])
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
    tensor_ids, inputs = ([found[buffer][i] for buffer, _ in order] for i in range(2))
    return CompiledGraph(graph_hash, inputs, tensor_ids, seeds, [output for _, output in order])


class Seed(NamedTuple):
    """A parameter that is a random seed: for a run that begins with the seed s, factor * s + offset modulo 2**64."""

    place: int
    factor: int
    offset: int


def seeds_of(graph: CompiledGraph, start: int) -> list[Seed]:
    """The seeds of a graph whose trace began with the seed `start`.

    A checkpoint of activations sets the seed to what it was after some draws, so a graph may have several. What is not
    among them, such as the seed of ``torch_xla.manual_seed(7)`` in the function, is the same in each run.
    """
    values = {place: int(graph.inputs[place].cpu()) for place in graph.seeds}
    bits = {place: 8 * graph.inputs[place].element_size() for place in graph.seeds}
    found: list[Seed] = []
    factor, offset = 1, 0
    for _ in range(_MOST_DRAWS):
        seed = factor * start + offset
        for place in [place for place, value in values.items() if (value - seed) % 2 ** bits[place] == 0]:
            found.append(Seed(place, factor, offset))
            del values[place]
        if not values:
            break
        factor, offset = factor * 214013 % 2**64, (offset * 214013 + 2531011) % 2**64  # as torch_xla does at each draw
    return found


_MOST_DRAWS = 10_000  # of one step


def run_graph(graph_hash: bytes, inputs: list[Any], seeds: Sequence[Seed]) -> list[torch.Tensor]:
    """Runs a graph of `compile_graph`. Advances the random seed, if the graph reads it, as the end of a step does."""
    if seeds:
        import torch_xla.core.xla_model as xm

        device = str(inputs[seeds[0].place].device)
        # Pending work has drawn from the base seed, so this graph draws from the running one.
        start = xlac()._xla_get_rng_seed()
        for place, factor, offset in seeds:
            xm.set_rng_state((factor * start + offset) % 2**64, device)
            inputs[place] = xlac()._get_base_seed_as_tensor(device)
        xm.set_rng_state(start, device)
    outputs = list(xlac()._run_cached_graph(graph_hash, inputs))
    if seeds:  # after the run, because it may find its graph evicted
        xm.set_rng_state((1012031 + start * 7012063) % 2**64, device)
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
