"""The cost of a call of compile(f, donate_argnums=0) on its thread: processor time, and instructions beside JAX."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import step_cost
import torch
import torch_xla
from jax_side_by_side import sgd

import torch_xla_donate


def update(state: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    return {layer: {name: value * 0.999 for name, value in parts.items()} for layer, parts in state.items()}


def make_state(leaves: int) -> dict[str, dict[str, torch.Tensor]]:
    """Small dictionaries in a large one, as a model's state."""
    state = {f"layer{i}": {name: torch.ones(2).to("xla") for name in "wb"} for i in range(leaves // 2)}
    _common.step()
    return state


def call(function: Callable[[Any], Any], state: Any) -> _common.Timed:
    """A loop of one call a sample, each with the result of the one before, as a training loop does."""
    for _ in range(3):
        state = function(state)

    def run() -> float:
        nonlocal state
        start = time.thread_time_ns()
        state = function(state)
        taken = time.thread_time_ns() - start
        _common.step()
        return taken / 1e9

    return run


# ---- Beside torch_xla's own start of a compiled graph, and JAX ----

PURE, STOCK, JAX = "pure=True, donated", "_run_cached_graph of torch_xla alone, not donated", "JAX, donated"
COUNTED, CALLS = 500, 4
OURS_MS = 2


def stock_run(weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Runs the graph of sgd() as torch.compile's bridge does. All inputs are alike, so their order does not matter."""
    bridge = torch_xla._XLAC
    (outputs,) = sgd([weights], gradients)
    _, inputs = bridge._get_tensors_xla_device_data_node(outputs)
    graph = bridge._get_graph_hash(outputs)
    bridge._xla_warm_up_cache(outputs, [])
    return lambda: list(bridge._run_cached_graph(graph, inputs))


def ways(count: int) -> dict[str, tuple[Callable[[Any], Any], Any]]:
    """The ways to call sgd() with ``count`` parameters, each with the state of its first call."""
    import jax

    gradients = _common.small_tensors(count)
    pure = torch_xla_donate.compile(sgd, donate_argnums=0, pure=True)
    jitted = jax.jit(sgd, donate_argnums=0)
    on_jax = [[jax.numpy.ones(2) for _ in range(count)] for _ in range(2)]
    stock = stock_run(_common.small_tensors(count), gradients)
    return {
        STOCK: (lambda _: stock(), None),
        PURE: (lambda state: pure(state, gradients), [_common.small_tensors(count)]),
        JAX: (lambda state: jitted(state, on_jax[1]), on_jax[:1]),
    }


def child(count: int) -> None:
    """The process that is counted: a dump for each way to call sgd(), of some calls after three that do not count."""
    step_cost.begin_counting()
    for name, (function, state) in ways(count).items():
        for _ in range(3):
            state = function(state)
        with step_cost.counted(name):
            for _ in range(CALLS):
                state = function(state)
        _common.step()


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    labels = {
        "torch_xla.compile": "`torch_xla.compile(f)`",
        "lazy": "`compile(f, donate_argnums=0)`",
        "pure": "`compile(f, donate_argnums=0, pure=True)`",
    }
    leaves = result["rows"][0]["leaves"]
    counts = result["instructions"]
    return {
        "instructions": _common.Table(
            "call_cost: the calling thread in a call of SGD",
            ("a call of SGD", "instructions for each parameter", f"ms for {leaves:,} parameters"),
            [
                (name, f"{counts[name]:,.0f}" if isinstance(counts, Mapping) else "not counted", f"{ms:.2f}")
                for name, ms in result["sgd_ms"].items()
            ],
            caption=_common.aim(result),
        ),
        "all": _common.Table(
            f"call_cost: processor time of a call with {leaves:,} donated leaves",
            (f"a call with {leaves:,} tensors", "ms", "ratio (95%)"),
            [(labels[row["call"]], f"{row['ms']:.2f}", _common.shown(row["ratio"], 2)) for row in result["rows"]],
        ),
    }


@click.command()
@click.option("--child", "as_child", hidden=True)
@_common.tiny_option
@_common.results_option
def main(as_child: str | None, tiny: bool, results: Path) -> None:
    """Cost of a call; some minutes, most of them under valgrind."""
    if as_child is not None:
        child(json.loads(as_child))
        return
    leaves, rounds, many_rounds = (4, 2, 2) if tiny else (1_000, 31, 241)
    beside = _common.side_by_side({name: call(*way) for name, way in ways(leaves).items()}, many_rounds)
    ours = _common.spread([(pure - stock) * 1e3 for pure, stock in zip(beside[PURE], beside[STOCK])])
    functions = {
        "torch_xla.compile": torch_xla.compile(update),
        "lazy": torch_xla_donate.compile(update, donate_argnums=0),
        "pure": torch_xla_donate.compile(update, donate_argnums=0, pure=True),
    }
    samples = _common.side_by_side({name: call(f, make_state(leaves)) for name, f in functions.items()}, rounds)
    rows = [
        {
            "call": name,
            "leaves": leaves,
            "ms": statistics.median(seconds) * 1e3,
            "ratio": _common.ratio(seconds, samples["torch_xla.compile"]),
        }
        for name, seconds in samples.items()
    ]
    result = _common.describe("call_cost", {"tiny": tiny}, "jax", "jaxlib")
    result["clock"] = "processor time of the calling thread"
    result["rows"] = rows
    if step_cost.can_count(tiny):
        found = step_cost.under_valgrind(__file__, COUNTED)
        result["instructions"] = {name: found[name] / CALLS / COUNTED for name in (STOCK, PURE, JAX)}
    else:
        result["instructions"] = "not counted: needs valgrind"
    result["sgd_ms"] = {name: statistics.median(seconds) * 1e3 for name, seconds in beside.items()}
    result["ours_ms"] = ours
    result["aim"] = {
        "text": f"beside `_run_cached_graph` alone at most {OURS_MS} ms for {2 * leaves:,} tensors, "
        f"here {_common.shown(ours, 2)} ms",
        "met": ours["median"] <= OURS_MS,
    }
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
