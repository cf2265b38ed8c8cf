"""Tensors of a training state that move at a step, and the copies in its HLO, for each way of donating."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch_xla.core.xla_model as xm
from torch.utils import _pytree as pytree
from torch_xla import _XLAC

import torch_xla_donate
from torch_xla_donate.hlo.dump import copies

WARM_UP, STEADY = 3, 5
RATE, DECAY, BETA2 = 1e-2, 0.9, 0.999
LAYERS = 4

Tensors = list[torch.Tensor]
State = dict[str, Tensors]
Update = Callable[[State, Tensors], State]


def layers(size: int) -> Tensors:
    shapes = [(size, size)] * LAYERS + [(size,)] * LAYERS
    made = [torch.randn(*shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    return [tensor.to("xla") for tensor in made]


def like(tensors: Tensors) -> Tensors:
    return [torch.zeros_like(tensor) for tensor in tensors]


def descend(weights: Tensors, directions: Tensors) -> Tensors:
    return [weight - RATE * direction for weight, direction in zip(weights, directions)]


def blend(slow: Tensors, fast: Tensors) -> Tensors:
    return [DECAY * old + (1 - DECAY) * new for old, new in zip(slow, fast)]


def adam(state: State, grads: Tensors) -> State:
    m = blend(state["m"], grads)
    v = [BETA2 * old + (1 - BETA2) * grad * grad for old, grad in zip(state["v"], grads)]
    directions = [first / (second.sqrt() + 1e-8) for first, second in zip(m, v)]
    return {"weights": descend(state["weights"], directions), "m": m, "v": v}


def momentum(state: State, grads: Tensors) -> State:
    speed = [DECAY * old + grad for old, grad in zip(state["speed"], grads)]
    return {"weights": descend(state["weights"], speed), "speed": speed}


def average(state: State, grads: Tensors) -> State:
    weights = descend(state["weights"], grads)
    return {"average": blend(state["average"], weights), "weights": weights}


def gan(state: State, grads: Tensors) -> State:
    """Two networks, each with its momentum; the second one learns from the first one's new weights."""
    judge = momentum({"weights": state["judge"], "speed": state["judge's speed"]}, grads)
    pull = [grad + 0.1 * weight for grad, weight in zip(grads, judge["weights"])]
    maker = momentum({"weights": state["maker"], "speed": state["maker's speed"]}, pull)
    return {
        "maker": maker["weights"],
        "judge": judge["weights"],
        "maker's speed": maker["speed"],
        "judge's speed": judge["speed"],
    }


def cache(state: State, grads: Tensors) -> State:
    """Key and value caches of some layers; the row that is written is the same in each step."""
    rows = torch.zeros(1, dtype=torch.long, device="xla")
    return {
        name: [old.index_copy(0, rows, grad[:1] + i) for i, (old, grad) in enumerate(zip(old_layers, grads))]
        for name, old_layers in state.items()
    }


def keys_and_values(size: int) -> State:
    return {"keys": layers(size)[:LAYERS], "values": layers(size)[:LAYERS]}


PATTERNS: dict[str, tuple[Callable[[int], State], Update]] = {
    "functional Adam": (lambda size: {"weights": layers(size), "m": like(layers(size)), "v": like(layers(size))}, adam),
    "momentum SGD": (lambda size: {"weights": layers(size), "speed": like(layers(size))}, momentum),
    "moving average": (lambda size: {"average": layers(size), "weights": layers(size)}, average),
    "GAN": (
        lambda size: {
            "judge": layers(size),
            "maker": layers(size),
            "judge's speed": like(layers(size)),
            "maker's speed": like(layers(size)),
        },
        gan,
    ),
    "KV caches": (keys_and_values, cache),
}
IN_PLACE = "AdamW in place"
HEADS = {"lazy": "`compile`", "pure": "`pure=True`", "auto": "`auto_donate`"}
WAYS = ("stock", "marks", "lazy", "pure", "openxla", "auto")


def stepper(update: Update, way: str) -> Update:
    if way in ("lazy", "pure", "openxla"):
        options: dict[str, Any] = {"pure": True} if way == "pure" else {"backend": way}
        return torch_xla_donate.compile(update, donate_argnums=0, **options)  # type: ignore[no-any-return]

    def step(state: State, grads: Tensors) -> State:
        new = update(state, grads)
        if way == "marks":
            torch_xla_donate.donate_buffer(state)
        state.clear()  # the caller's only reference to the old tensors
        _common.step()
        return new

    return step


def adamw_in_place(size: int) -> tuple[State, Update]:
    weights = [torch.nn.Parameter(tensor) for tensor in layers(size)]
    optimizer = torch.optim.AdamW(weights, lr=RATE, foreach=False)

    def step(_: State, grads: Tensors) -> State:
        # The gradients stay alive into the step, as in the usual loop: they are outputs, and rivals for memory.
        for weight, grad in zip(weights, grads):
            weight.grad = grad + 0.1 * weight.detach()
        optimizer.step()
        _common.step()
        entries = [optimizer.state[weight] for weight in weights]
        return {"weights": list(weights), **{key: [e[key] for e in entries] for key in ("exp_avg", "exp_avg_sq")}}

    return {"weights": list(weights)}, step


def places(state: State) -> list[int]:
    xm.wait_device_ops()
    return [_XLAC._unsafe_buffer_pointer(tensor) for tensor in pytree.tree_leaves(state)]


def run(pattern: str, way: str, size: int) -> dict[str, int]:
    torch_xla_donate.set_auto_donate(way == "auto")
    if pattern == IN_PLACE:
        state, step = adamw_in_place(size)
    else:
        make, update = PATTERNS[pattern]
        state, step = make(size), stepper(update, way)
    grads = layers(size)
    _common.step()
    for _ in range(WARM_UP):
        state = step(state, grads)
    compiled, moved = _common.compiles(), 0
    for _ in range(STEADY):
        before = places(state)
        state = step(state, grads)
        moved = max(moved, sum(old != new for old, new in zip(before, places(state))))
    return {"tensors": len(places(state)), "moved": moved, "compiled": _common.compiles() - compiled}


def measure(pattern: str, way: str, size: int) -> dict[str, int]:
    with _common.dumped_step(run, pattern, way, size) as (found, _, text):
        return {**found, "copies": len(copies(text))}


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    def cell(found: Mapping[str, int] | None) -> str:
        return "" if found is None else f"{found['moved']} of {found['tensors']}, {found['copies']}"

    return {
        "all": _common.Table(
            "moved_tensors: tensors that move in a steady step, copies in its HLO",
            ("pattern", *(HEADS.get(way, way) for way in WAYS)),
            [(row["pattern"], *(cell(row["ways"].get(way)) for way in WAYS)) for row in result["rows"]],
            _common.aim(result),
        )
    }


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Moved tensors and copies of training states."""
    size = 16 if tiny else 256
    rows = []
    for pattern in (*PATTERNS, IN_PLACE):
        ways = ("stock", "auto") if pattern == IN_PLACE else WAYS
        rows.append({"pattern": pattern, "ways": {way: measure(pattern, way, size) for way in ways}})
    donated = [found for row in rows for way, found in row["ways"].items() if way != "stock"]  # type: ignore[attr-defined]
    result = _common.describe("moved_tensors", {"tiny": tiny})
    result["step"] = f"the most tensors that moved in one of {STEADY} steady steps, and the copies in its HLO"
    result["rows"] = rows
    result["aim"] = {
        "text": "no tensor moves and nothing is compiled in a steady step, in every way of donating",
        "met": all(found["moved"] == found["compiled"] == 0 for found in donated),
    }
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
