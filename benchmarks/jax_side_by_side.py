"""Functional SGD and Adam, donated and not, beside an update in place and beside JAX: time of a step, peak memory."""

from __future__ import annotations

import functools
import gc
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch_xla
import torch_xla.core.xla_model as xm

import torch_xla_donate

PLAIN, BASE, IN_PLACE = "not donated", "JAX, donated", "in place"
# How each is called, by its name in the result.
OPTIONS: dict[str, Mapping[str, Any]] = {"compile": {}, "pure=True": {"pure": True}, "openxla": {"backend": "openxla"}}
VARIANTS = (PLAIN, "marks", *OPTIONS, IN_PLACE, "JAX", BASE)
# The update, the tensors of parameters, floats of each.
CASES = {
    "SGD, 1 x 256 MiB": ("sgd", 1, 1 << 26),
    "SGD, 64 x 4 MiB": ("sgd", 64, 1 << 20),
    "SGD, 1,000 x 64 KiB": ("sgd", 1_000, 1 << 14),
    "Adam, 1 x 256 MiB": ("adam", 1, 1 << 26),
    "Adam, 1,000 x 64 KiB": ("adam", 1_000, 1 << 14),
}
TINY_CASES = {"SGD, 2 x 4 KiB": ("sgd", 2, 1 << 10), "Adam, 2 x 4 KiB": ("adam", 2, 1 << 10)}
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


def sgd_in_place(state: Any, gradients: Any) -> Any:
    for weight, gradient in zip(state[0], gradients):
        weight.sub_(RATE * gradient)
    torch_xla.sync()
    return state


UPDATES: dict[str, tuple[Step, int]] = {"sgd": (sgd, 1), "adam": (adam, 3)}


def variants_of(update: str) -> list[str]:
    return [variant for variant in VARIANTS if variant != IN_PLACE or update == "sgd"]


def in_jax(update: Step, donated: bool) -> tuple[Step, Callable[[int, float], Any], Callable[[Any], None]]:
    """The step, what makes an array, and what waits until every output is there."""
    import jax
    import jax.numpy as jnp

    def wait(results: Any) -> None:
        jax.block_until_ready(results)

    return jax.jit(update, donate_argnums=0 if donated else ()), lambda n, value: jnp.full((n,), value), wait


def in_torch(update: Step, variant: str) -> tuple[Step, Callable[[int, float], Any], Callable[[Any], None]]:
    def marks(state: Any, gradients: Any) -> Any:
        torch_xla_donate.donate_buffer(state)
        updated = update(state, gradients)
        torch_xla.sync()
        return updated

    step: Step
    if variant in OPTIONS:
        step = torch_xla_donate.compile(update, donate_argnums=0, **OPTIONS[variant])
    else:
        step = {PLAIN: torch_xla.compile(update), "marks": marks, IN_PLACE: sgd_in_place}[variant]

    def wait(results: Any) -> None:
        # Waits until nothing is running on the device: all that has been started are the outputs.
        xm.wait_device_ops()

    return step, lambda n, value: torch.full((n,), value).to("xla"), wait


def worker(variant: str, name: str, count: int, floats: int) -> None:
    """Runs as many steps as each line of standard input says; answers with seconds a step, and memory at the end."""
    update, arrays = UPDATES[name]
    torch._dynamo.config.recompile_limit = 64
    in_torch_xla = not variant.startswith("JAX")
    step, make, wait = in_torch(update, variant) if in_torch_xla else in_jax(update, variant == BASE)
    state: Any = []
    gradients: Any = []

    def run(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            state = step(state, gradients)
            wait(state)

    def begin() -> None:
        nonlocal state, gradients
        state = [[make(floats, START[k]) for _ in range(count)] for k in range(arrays)]
        gradients = [make(floats, GRADIENT) for _ in range(count)]
        if in_torch_xla:
            _common.step()
        else:
            wait((state, gradients))
        run(3)

    # Time as a user has it.
    begin()
    done = 3
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        steps = int(line)
        seconds = _common.wall(functools.partial(run, steps))
        done += steps
        gc.collect()
        print(json.dumps(seconds / steps), flush=True)
    check(update, arrays, done, [float(weight[-1]) for weight in (state[0][0], state[0][-1])])

    # Memory without what the allocator keeps. Everything but the arrays is there, the executable included.
    _common.keep_no_freed_arrays()
    state = gradients = []
    if in_torch_xla:
        _common.step()
    _common.trim()
    baseline = _common.resident()
    begin()
    _common.trim()
    rest = _common.resident() - baseline
    _common.forget_peak()
    run(4)
    peak = _common.resident_peak() - baseline
    print(json.dumps({"live": (arrays + 1) * count * floats * 4, "rest": rest, "peak": peak}), flush=True)


def check(update: Step, arrays: int, done: int, found: Sequence[float]) -> None:
    """The same steps on plain numbers."""
    state: Any = [[value] for value in START[:arrays]]
    for _ in range(done):
        state = update(state, [GRADIENT])
    if not all(math.isclose(value, state[0][0], rel_tol=1e-3) for value in found):
        raise AssertionError(f"weights are {found} after {done} steps, expected {state[0][0]}")


def measure(case: str, update: str, count: int, floats: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each variant: all processes are alive, one at a time runs."""
    workers: dict[str, _common.Worker] = {}
    try:
        for variant in variants_of(update):
            options = ["--worker", variant, "--update", update, "--count", str(count), "--floats", str(floats)]
            workers[variant] = _common.Worker(variant, [__file__, *options])
        for found in workers.values():
            found.answer()
        turns = {variant: functools.partial(found.steps, 2) for variant, found in workers.items()}
        seconds = _common.side_by_side(turns, rounds)
        memory = {variant: found.memory() for variant, found in workers.items()}
    finally:
        for found in workers.values():
            found.stop()
    return [
        {
            "case": case,
            "variant": variant,
            "live_bytes": memory[variant]["live"],
            "rest_over_live": memory[variant]["rest"] / memory[variant]["live"],
            "peak_over_live": memory[variant]["peak"] / memory[variant]["live"],
            "step_ms": statistics.median(seconds[variant]) * 1e3,
            "over_not_donated": _common.ratio(seconds[variant], seconds[PLAIN]),
            "over_jax_donated": _common.ratio(seconds[variant], seconds[BASE]),
        }
        for variant in variants_of(update)
    ]


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    cases: dict[str, dict[str, Any]] = {}
    for row in result["rows"]:
        cases.setdefault(row["case"], {})[row["variant"]] = row

    def table(title: str, caption: str, shown: Callable[[Any], str], variants: Sequence[str]) -> _common.Table:
        rows = [[case, *(shown(of[one]) if one in of else "" for one in variants)] for case, of in cases.items()]
        return _common.Table(f"jax_side_by_side: {title}", ("update", *variants), rows, caption)

    donated = ("marks", *OPTIONS)
    summary = [
        [
            case,
            f"{of['marks']['over_not_donated']['median']:.2f}",
            f"{of['marks']['peak_over_live'] / of[PLAIN]['peak_over_live']:.2f}",
            *(f"{of[variant]['over_jax_donated']['median']:.2f}" for variant in ("compile", "pure=True")),
        ]
        for case, of in cases.items()
    ]
    return {
        "summary": _common.Table(
            "jax_side_by_side: a donated update, relative to ...",
            ("update", "time, not donated", "peak memory, not donated", "time, JAX", "time of `pure=True`, JAX"),
            summary,
        ),
        "time": table(
            "time of a step, relative to the step that is not donated (95%)",
            result["waiting"],
            lambda row: _common.shown(row["over_not_donated"], 2),
            (*donated, IN_PLACE),
        ),
        "memory": table(
            "peak memory / live bytes (memory between the steps / live bytes)",
            result["live"],
            lambda row: f"{row['peak_over_live']:.2f} ({row['rest_over_live']:.2f})",
            VARIANTS,
        ),
        "beside": table(
            "time of a step, relative to JAX with donation (95%)",
            _common.aim(result),
            lambda row: _common.shown(row["over_jax_donated"], 2),
            donated,
        ),
    }


@click.command()
@_common.tiny_option
@_common.results_option
@click.option("--worker", "variant", type=click.Choice(VARIANTS), hidden=True)
@click.option("--update", type=click.Choice(tuple(UPDATES)), default="sgd", hidden=True)
@click.option("--count", type=int, default=1, hidden=True)
@click.option("--floats", type=int, default=1, hidden=True)
def main(tiny: bool, results: Path, variant: str | None, update: str, count: int, floats: int) -> None:
    """Functional updates, donated and not, in place, and in JAX."""
    if variant is not None:
        worker(variant, update, count, floats)
        return
    rows = []
    for case, sizes in (TINY_CASES if tiny else CASES).items():
        rows += measure(case, *sizes, 2 if tiny else 15)
    result = _common.describe("jax_side_by_side", {"tiny": tiny}, "jax", "jaxlib")
    result["waiting"] = "A step ends when all its outputs are there."
    result["live"] = (
        "Live bytes are weights, gradients and, for Adam, two moments. The peak is resident memory less what the "
        "process has without arrays; freed arrays leave the process."
    )
    result["rows"] = rows
    pure = [row["over_jax_donated"] for row in rows if row["variant"] == "pure=True"]
    result["aim"] = {
        "text": "`pure=True` is not slower than JAX with donation",
        "met": all(ratio["low"] <= 1 for ratio in pure),
    }
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
