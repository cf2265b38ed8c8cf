"""Llama's training step compiled for TPUs that are not there: bytes on each device, with and without donation.

The layers are one scan, whose backward pass computes each layer again. Gradient accumulation is a loop on the device.
AdamW has bf16 weights and fp32 moments. Every weight except the norms is divided among the devices.

    python examples/llama.py                                       # the table of `make llama`
    python examples/llama.py --size 8b --devices 32 --topology v6e:4x8 --way by-hand
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _memory_model as model
import click
import numpy as np
import torch
import torch.nn.functional as F
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._functorch import config as functorch
from torch._functorch.partitioners import min_cut_rematerialization_partition

import torch_xla_donate as txd

Tensors = dict[str, torch.Tensor]
State = dict[str, Any]
Mark = Callable[[str, torch.Tensor], torch.Tensor]

LEARNING_RATE, BETA1, BETA2, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 0.1
ROPE_BASE, EPSILON = 500_000.0, 1e-5
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "llama.json"
FIGURE = Path(__file__).resolve().parents[1] / "docs" / "memory_model.svg"
# Size, devices, topology: the table of `make llama`, and what the docs show besides.
SHORT = [("tiny", 1, "v6e:1x1"), ("tiny", 4, "v6e:2x2"), ("1b", 16, "v6e:4x4")]
LONG = [
    *(("1b", devices, topology) for devices, topology in ((1, "v6e:1x1"), (4, "v6e:2x2"), (16, "v6e:4x4"))),
    *(("1b", 64, "v6e:8x8"), ("8b", 32, "v6e:4x8"), ("8b", 32, "v5e:4x8"), ("70b", 64, "v6e:8x8")),
]
WAYS = ("functional", "in-place", "by-hand", "auto")
LONG_WAYS = ("functional", "by-hand")  # the others alias what `by-hand` does


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight


def rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Queries or keys [batch, heads, time, width] turned by their positions."""
    half = x.shape[-1] // 2
    angles = at[:, None] * torch.pow(ROPE_BASE, -torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def layer_of(size: model.Size) -> Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, None]]:
    width = size.width // size.heads

    def layer(x: torch.Tensor, w: Tensors) -> tuple[torch.Tensor, None]:
        h = normalised(x, w["norm1"])
        at = torch.arange(x.shape[1], device=x.device)
        q = rotated((h @ w["q"]).unflatten(-1, (size.heads, width)).transpose(1, 2), at)
        k = rotated((h @ w["k"]).unflatten(-1, (size.kv_heads, width)).transpose(1, 2), at)
        v = (h @ w["v"]).unflatten(-1, (size.kv_heads, width)).transpose(1, 2)
        k, v = (t.repeat_interleave(size.heads // size.kv_heads, 1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(width)
        attention = scores.masked_fill(at[:, None] < at, -1e9).softmax(-1).to(x.dtype)
        x = x + (attention @ v).transpose(1, 2).flatten(-2) @ w["o"]
        h = normalised(x, w["norm2"])
        return x + (F.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    return layer


def loss_of(params: Tensors, text: torch.Tensor, size: model.Size) -> torch.Tensor:
    """Mean cross entropy of each token of `text` [batch, time + 1] from those before it."""
    x = params["embedding"][text[:, :-1]]
    layers = {name: p for name, p in params.items() if name not in model.OUTSIDE}
    with functorch.patch(activation_memory_budget=0.0):  # saves only the input of each layer
        x, _ = txd.scan(layer_of(size), x, layers, partition_fn=min_cut_rematerialization_partition)
    x = normalised(x, params["norm"])
    logits = (x @ params["embedding" if size.is_tied else "head"].T).float()
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten().long())


def gradients(params: Tensors, batches: torch.Tensor, size: model.Size) -> tuple[Tensors, torch.Tensor]:
    """Gradients and mean loss of `batches` [count, batch, time + 1]; a loop on the device goes over them."""
    weights = nn.ParameterDict(params)
    loss = txd.gradient_accumulation(lambda text: loss_of(dict(weights.items()), text, size), (batches,), weights)
    return {name: p.grad for name, p in weights.items()}, loss


@torch.no_grad()
def adamw(state: State, grads: Tensors, mark: Mark) -> State:
    """One step of AdamW: the new state. The old one is only read.

    Each array of the new state is marked with its sharding. Otherwise XLA chooses one, with other bytes on each device.
    """
    step = state["step"] + 1
    rate = LEARNING_RATE * (1 - BETA2**step).sqrt() / (1 - BETA1**step)
    new: State = {"params": {}, "m": {}, "v": {}, "step": step}
    for name, grad in grads.items():
        g = mark(name, grad).float()
        m = BETA1 * state["m"][name] + (1 - BETA1) * g
        v = BETA2 * state["v"][name] + (1 - BETA2) * g * g
        p = state["params"][name].float() * (1 - LEARNING_RATE * WEIGHT_DECAY) - rate * m / (v.sqrt() + 1e-8)
        new["m"][name], new["v"][name] = mark(name, m), mark(name, v)
        new["params"][name] = mark(name, p.bfloat16())
    return new


def steps_of(size: model.Size, mark: Mark) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The training step as a function, and one that updates the state in place."""

    def functional(state: State, batches: torch.Tensor) -> tuple[State, torch.Tensor]:
        grads, loss = gradients(state["params"], batches, size)
        return adamw(state, grads, mark), loss

    def in_place(state: State, batches: torch.Tensor) -> torch.Tensor:
        new, loss = functional(state, batches)
        with torch.no_grad():
            state["step"].copy_(new["step"])
            for kind in ("params", "m", "v"):
                for name, tensor in state[kind].items():
                    tensor.copy_(new[kind][name])
        return loss

    return functional, in_place


def mesh_of(devices: int) -> Any:
    """The devices in a row; None for a single one."""
    if devices == 1:
        return None
    xr.use_spmd()
    return xs.Mesh(np.arange(devices), (devices,), ("model",))


def marker(mesh: Any) -> Mark:
    def mark(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if mesh is not None:
            xs.mark_sharding(tensor, mesh, model.spec(name, tensor.dim()))
        return tensor

    return mark


def lower(size: model.Size, devices: int, way: str) -> Any:
    """The step traced with placeholders. `auto` is `auto_donate`, which donates the old state, as `by-hand` does."""
    mesh = mesh_of(devices)

    def arrays(dtype: torch.dtype) -> Tensors:
        shapes = size.shapes().items()
        return {n: txd.placeholder(s, dtype, sharding=mesh and (mesh, model.spec(n, len(s)))) for n, s in shapes}

    number = txd.placeholder((), torch.float32, sharding=mesh and (mesh, ()))
    moments = {moment: arrays(torch.float32) for moment in ("m", "v")}
    state = {"params": arrays(torch.bfloat16), **moments, "step": number}
    batches = txd.placeholder((size.accumulate, 1, size.sequence + 1), torch.int32)
    functional, in_place = steps_of(size, marker(mesh))
    donated = 0 if way in ("by-hand", "auto") else None
    return txd.compile(in_place if way == "in-place" else functional, donate_argnums=donated).lower(state, batches)


def measure(name: str, layers: int | None, devices: int, topology: str, way: str) -> dict[str, Any]:
    """Compiles one step in this process, which has as many virtual devices."""
    size = model.SIZES[name]
    size = dataclasses.replace(size, layers=layers or size.layers)
    row = {"size": name, "layers": size.layers, "devices": devices, "topology": topology, "way": way}
    start = time.perf_counter()
    lowered = lower(size, devices, way)
    lowered.as_text()
    traced = time.perf_counter()
    try:
        compiled = lowered.compile(topology)
    except RuntimeError as error:
        row["error"] = str(error).partition("\n")[0]
    else:
        row["memory"] = dataclasses.asdict(compiled.memory_analysis())
        row["donors"] = len(compiled.donors)
        row["aliased"] = sum(donor.output is not None for donor in compiled.donors)
    return row | {"lower_seconds": traced - start, "compile_seconds": time.perf_counter() - traced}


def measure_in_a_process(name: str, layers: int | None, devices: int, topology: str, way: str) -> dict[str, Any]:
    """torch_xla reads the number of devices once in a process, so each row has one."""
    command = [sys.executable, __file__, "--size", name, "--devices", str(devices), "--topology", topology]
    command += ["--way", way, "--json", *(("--layers", str(layers)) if layers else ())]
    env = os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(devices)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)} ended with {done.returncode}")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Llama: MiB on each device", title_justify="left")
    for column in ("model", "devices", "topology", "way"):
        table.add_column(column)
    for column in ("arguments", "outputs", "aliased", "temporaries", "sum", "formula", "donors", "compiled in"):
        table.add_column(column, justify="right")
    for row in rows:
        start = [row["size"], str(row["devices"]), row["topology"], row["way"]]
        end = f"{row['compile_seconds']:.0f} s"
        if "error" in row:
            table.add_row(*start, row["error"][:60], *[""] * 6, end)
            continue
        memory = [row["memory"][f"{kind}_bytes"] / model.MIB for kind in ("argument", "output", "alias", "temp")]
        total = model.measured(row) / model.MIB
        donates = row["way"] != "functional"
        expected = model.total(model.size_of(row), row["devices"], row["topology"], donates) / model.MIB
        shown = [f"{value:,.1f}" for value in (*memory, total, expected)]
        table.add_row(*start, *shown, f"{row['aliased']} of {row['donors']}", end)
    return table


@click.command(help=__doc__.partition("\n")[0])
@click.option("--size", "name", type=click.Choice(list(model.SIZES)), help="Default: the table of `make llama`.")
@click.option("--layers", type=click.IntRange(min=1), help="Fewer layers than the model has.")
@click.option("--devices", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--topology", default="v6e:1x1", show_default=True, help="As for `torch_xla_donate.hlo.compile_for`.")
@click.option("--way", type=click.Choice(WAYS), help="Default: all four.")
@click.option("--all", "everything", is_flag=True, help="All cases of the docs, and save them. Takes about an hour.")
@click.option("--json", "as_json", is_flag=True, hidden=True)
def main(
    name: str | None, layers: int | None, devices: int, topology: str, way: str | None, everything: bool, as_json: bool
) -> None:
    if as_json and name and way:
        print(json.dumps(measure(name, layers, devices, topology, way)))
        return
    if everything and (name or layers or way):
        raise click.UsageError("--all compiles and saves the cases of the docs: leave --size, --layers and --way out")
    cases, ways = (LONG, LONG_WAYS) if everything else (SHORT, WAYS)
    rows = []
    for case in [(name, devices, topology)] if name else cases:
        for one in [way] if way else ways:
            rows.append(measure_in_a_process(case[0], layers, case[1], case[2], one))
            click.echo(f"{case[0]} on {case[1]} devices, {one}: {rows[-1]['compile_seconds']:.0f} s", err=True)
    Console(width=150).print(table_of(rows))
    if everything:
        sys.path.insert(0, str(RESULTS.parents[1]))
        from _common import describe

        found = {**describe("llama", {}, "jax", command="python examples/llama.py --all"), "rows": rows}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        model.draw(rows, FIGURE)


if __name__ == "__main__":
    main()
