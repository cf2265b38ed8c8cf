"""Functional SGD and Adam beside JAX: time of a step, time until the call returns, peak memory."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch_xla
import torch_xla.core.xla_model as xm

import torch_xla_donate

BASE = "jax_donated"
VARIANTS = ("jax", BASE, "lazy", "lazy_donated", "pure_donated", "openxla_donated")
# Tensors of parameters, floats of each.
CASES = {"1 x 256 MiB": (1, 1 << 26), "64 x 4 MiB": (64, 1 << 20), "1,000 x 64 KiB": (1_000, 1 << 14)}
TINY_CASES = {"2 x 4 KiB": (2, 1 << 10)}
RATE, BETA, GAMMA, SMALL = 0.125, 0.875, 0.75, 1e-3
# Of weights, then of moments; and of the gradients.
START, GRADIENT = (1.0, 0.25, 0.5), 0.5

Step = Callable[[Any, Any], Any]


def sgd(state: Any, gradients: Any) -> Any:
    return [[weight - RATE * gradient for weight, gradient in zip(state[0], gradients)]]


def adam(state: Any, gradients: Any) -> Any:
    firsts = [BETA * first + (1 - BETA) * gradient for first, gradient in zip(state[1], gradients)]
    seconds = [GAMMA * second + (1 - GAMMA) * gradient * gradient for second, gradient in zip(state[2], gradients)]
    weights = [w - RATE * m / (v**0.5 + SMALL) for w, m, v in zip(state[0], firsts, seconds)]
    return [weights, firsts, seconds]


UPDATES: dict[str, tuple[Step, int]] = {"sgd": (sgd, 1), "adam": (adam, 3)}


def in_jax(update: Step, donated: bool) -> tuple[Step, Callable[[int, float], Any], Callable[[Any], None]]:
    """The step, what makes an array, and what waits until every output is there."""
    import jax
    import jax.numpy as jnp

    def wait(results: Any) -> None:
        jax.block_until_ready(results)

    return jax.jit(update, donate_argnums=0 if donated else ()), lambda n, value: jnp.full((n,), value), wait


def in_torch(update: Step, variant: str) -> tuple[Step, Callable[[int, float], Any], Callable[[Any], None]]:
    options: dict[str, Mapping[str, Any]] = {
        "lazy_donated": {},
        "pure_donated": {"pure": True},
        "openxla_donated": {"backend": "openxla"},
    }
    step: Step
    if variant == "lazy":
        step = torch_xla.compile(update)
    else:
        step = torch_xla_donate.compile(update, donate_argnums=0, **options[variant])

    def wait(results: Any) -> None:
        # Waits until nothing is running on the device: all that has been started are the outputs.
        xm.wait_device_ops()

    return step, lambda n, value: torch.full((n,), value).to("xla"), wait


def worker(variant: str, name: str, count: int, floats: int) -> None:
    """Runs as many steps as each line of standard input says; answers with seconds, or memory at the end."""
    update, arrays = UPDATES[name]
    torch._dynamo.config.recompile_limit = 64
    step, make, wait = in_jax(update, variant == BASE) if variant.startswith("jax") else in_torch(update, variant)
    state: Any = []
    gradients: Any = []

    def run() -> float:
        nonlocal state
        start = time.perf_counter()
        state = step(state, gradients)
        dispatched = time.perf_counter() - start
        wait(state)
        return dispatched

    def begin() -> None:
        nonlocal state, gradients
        state = [[make(floats, START[k]) for _ in range(count)] for k in range(arrays)]
        gradients = [make(floats, GRADIENT) for _ in range(count)]
        wait_for_inputs()
        for _ in range(3):
            run()

    def wait_for_inputs() -> None:
        if variant.startswith("jax"):
            wait((state, gradients))
        else:
            _common.step()

    # Everything but the arrays is there after this, the executable included: that is the baseline.
    begin()
    state = gradients = []
    if not variant.startswith("jax"):
        _common.step()
    _common.trim()
    baseline = _common.resident()

    begin()
    _common.trim()
    _common.forget_peak()
    done = 3
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        steps = int(line)
        dispatched: list[float] = []
        seconds = _common.wall(functools.partial(dispatched.extend, (run() for _ in range(steps))))
        done += steps
        gc.collect()
        print(json.dumps({"step": seconds / steps, "dispatch": sum(dispatched) / steps}), flush=True)
    peak = _common.resident_peak()
    check(update, arrays, done, [float(weight[-1]) for weight in (state[0][0], state[0][-1])])
    print(json.dumps({"live": (arrays + 1) * count * floats * 4, "peak": peak - baseline}), flush=True)


def check(update: Step, arrays: int, done: int, found: Sequence[float]) -> None:
    """The same steps on plain numbers."""
    state: Any = [[value] for value in START[:arrays]]
    for _ in range(done):
        state = update(state, [GRADIENT])
    if not all(math.isclose(value, state[0][0], rel_tol=1e-3) for value in found):
        raise AssertionError(f"weights are {found} after {done} steps, expected {state[0][0]}")


def take_turns(
    name: str, count: int, floats: int, rounds: int, repeat: int, environment: Mapping[str, str]
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, dict[str, int]]]:
    """Seconds a step, seconds until its call returned, and memory, of each variant: one process at a time runs."""
    workers: dict[str, _common.Worker] = {}
    dispatched: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    try:
        for variant in VARIANTS:
            options = ["--worker", variant, "--update", name, "--count", str(count), "--floats", str(floats)]
            workers[variant] = _common.Worker(variant, [__file__, *options], environment)
        for found in workers.values():
            found.answer()

        def turn(variant: str) -> float:
            answer = workers[variant].steps(repeat)
            dispatched[variant].append(answer["dispatch"])
            return float(answer["step"])

        turns = {variant: functools.partial(turn, variant) for variant in VARIANTS}
        seconds = _common.side_by_side(turns, rounds)
        return seconds, dispatched, {variant: found.memory() for variant, found in workers.items()}
    finally:
        for found in workers.values():
            found.stop()


def measure(case: str, name: str, count: int, floats: int, tiny: bool) -> list[dict[str, Any]]:
    """Time as a user has it; memory without what the allocator keeps back."""
    seconds, dispatched, memory = take_turns(name, count, floats, 2 if tiny else 10, 2, {})
    if not tiny:
        _, _, memory = take_turns(name, count, floats, 2, 2, _common.EXACT)
    return [
        {
            "case": case,
            "update": name,
            "variant": variant,
            "live_bytes": memory[variant]["live"],
            "peak_over_live": memory[variant]["peak"] / memory[variant]["live"],
            "step_ms": statistics.median(seconds[variant]) * 1e3,
            "dispatch_ms": statistics.median(dispatched[variant]) * 1e3,
            "step": _common.ratio(seconds[variant], seconds[BASE]),
            "dispatch": _common.ratio(dispatched[variant], dispatched[BASE]),
        }
        for variant in VARIANTS
    ]


@click.command()
@_common.tiny_option
@_common.results_option
@click.option("--worker", "variant", type=click.Choice(VARIANTS), hidden=True)
@click.option("--update", "name", type=click.Choice(tuple(UPDATES)), default="sgd", hidden=True)
@click.option("--count", type=int, default=1, hidden=True)
@click.option("--floats", type=int, default=1, hidden=True)
def main(tiny: bool, results: Path, variant: str | None, name: str, count: int, floats: int) -> None:
    """Functional updates beside JAX."""
    if variant is not None:
        worker(variant, name, count, floats)
        return
    rows = []
    for case, (tensors, size) in (TINY_CASES if tiny else CASES).items():
        for update in UPDATES:
            rows += measure(case, update, tensors, size, tiny)
    result = _common.describe("jax_side_by_side", "python benchmarks/jax_side_by_side.py", {"tiny": tiny})
    result["jax"] = importlib.metadata.version("jax")
    result["live"] = "weights and gradients; for adam its two moments, too"
    result["waiting"] = "after each step: jax.block_until_ready(all outputs), or xm.wait_device_ops()"
    result["rows"] = rows
    _common.finish(
        results,
        result,
        _common.table_of(
            "jax_side_by_side: functional updates",
            ("parameters", "update", "variant", "peak / live", "step / JAX donated (95%)", "dispatch / JAX donated"),
            [
                (
                    row["case"],
                    row["update"],
                    row["variant"].replace("_", " "),
                    f"{row['peak_over_live']:.3f}",
                    _common.shown(row["step"]),
                    _common.shown(row["dispatch"]),
                )
                for row in rows
            ],
            f"Live: {result['live']}. Peak: resident memory less what the process has without arrays, freed arrays "
            f"leaving the process. Waiting: {result['waiting']}. Dispatch: until the call returns.",
        ),
    )


if __name__ == "__main__":
    main()
