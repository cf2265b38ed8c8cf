"""How often a donating training differs from the same one without donation in the last bits of its parameters.

XLA may fuse a graph differently if its outputs have another order, and then round differently. The trainings are small
and random, but the same in every run of this file. Each way of donating runs in a separate process, because the
switch that keeps the order is read at the import.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch.nn.functional as F
import torch_xla

import torch_xla_donate

# The loop, the way of donating, and whether the graph keeps its order.
WAYS = {
    "functions, marks": ("functions", "marks", False),
    "functions, compile": ("functions", "compile", False),
    "functions, auto": ("functions", "auto", False),
    "functions, auto, order kept": ("functions", "auto", True),
    "torch.optim, auto": ("torch.optim", "auto", False),
    "torch.optim, auto, order kept": ("torch.optim", "auto", True),
}
STEPS = 3
Tensors = list[torch.Tensor]


def configurations(count: int) -> list[dict[str, Any]]:
    chosen = random.Random(0)
    sizes = (1, 2, 3, 4, 8, 10, 16, 20, 32, 64)
    known = {"sizes": [3, 8, 20, 1], "activation": "Sigmoid", "optimizer": "SGD", "batches": 2, "batch": 16}
    return [known] + [
        {
            "sizes": [chosen.choice(sizes) for _ in range(chosen.choice((3, 4)))],
            "activation": chosen.choice(("ReLU", "Tanh", "GELU", "Sigmoid", "SiLU")),
            "optimizer": chosen.choice(("SGD", "Adam", "AdamW", "RMSprop")),
            "batches": chosen.choice((1, 2)),
            "batch": chosen.choice((1, 4, 16, 32)),
        }
        for _ in range(count - 1)
    ]


def network(config: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for fan_in, fan_out in zip(config["sizes"], config["sizes"][1:]):
        layers += [torch.nn.Linear(fan_in, fan_out), getattr(torch.nn, config["activation"])()]
    return torch.nn.Sequential(*layers[:-1]).to("xla")


def batches(config: dict[str, Any], numbers: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    sizes = (config["sizes"][0], config["sizes"][-1])
    return [
        tuple(torch.randn(config["batch"], size, generator=numbers).to("xla") for size in sizes)
        for _ in range(config["batches"])
    ]


def with_functions(config: dict[str, Any], way: str) -> Tensors:
    """Adam, written as a function of weights, moments and batches."""
    model = network(config)
    names = [name for name, _ in model.named_parameters()]

    def update(weights: Tensors, moments: Tensors, given: Any) -> tuple[Tensors, Tensors]:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        loss = sum(F.mse_loss(torch.func.functional_call(model, dict(zip(names, leaves)), (x,)), y) for x, y in given)
        first, second = moments[: len(leaves)], moments[len(leaves) :]
        gradients = torch.autograd.grad(loss, leaves)
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients)]
        second = [0.999 * v + 0.001 * g * g for v, g in zip(second, gradients)]
        return [w - 0.01 * m / (v.sqrt() + 1e-8) for w, m, v in zip(weights, first, second)], first + second

    weights = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [torch.zeros_like(weight) for weight in weights * 2]
    run: Callable[..., Any] = update
    if way == "compile":
        run = torch_xla_donate.compile(update, donate_argnums=(0, 1))
    numbers = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        given = batches(config, numbers)
        torch_xla.sync()
        if way == "marks":
            torch_xla_donate.donate_buffer([weights, moments])
        weights, moments = run(weights, moments, given)
        torch_xla.sync()
    return weights


def with_optimizer(config: dict[str, Any], way: str) -> Tensors:
    """torch.optim updates the weights in place."""
    model = network(config)
    options = {"momentum": 0.9} if config["optimizer"] == "SGD" else {}
    optimizer = getattr(torch.optim, config["optimizer"])(model.parameters(), lr=0.01, foreach=False, **options)
    numbers = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for x, y in batches(config, numbers):
            loss = F.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()  # the program prints it, so it is an output of the step
        torch_xla.sync()
    return list(model.parameters())


def train_all(loop: str, way: str, count: int) -> list[Tensors]:
    train = with_functions if loop == "functions" else with_optimizer
    # Autograd's own thread may hold a gradient into the step, now and then.
    with torch.autograd.set_multithreading_enabled(False), torch_xla_donate.auto_donate(way == "auto"):
        return [[tensor.detach().cpu() for tensor in train(config, way)] for config in configurations(count)]


def trained(loop: str, way: str, keep_order: bool, count: int) -> list[Tensors]:
    """The parameters of all trainings, from a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parameters.pt"
        command = [sys.executable, __file__, "--child", loop, way, str(path), "--count", str(count)]
        environment = {**os.environ, "TORCH_XLA_DONATE_KEEP_ORDER": "1" if keep_order else "0"}
        subprocess.run(command, env=environment, check=True)
        return torch.load(path)  # type: ignore[no-any-return]


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    count = result["options"]["trainings"]
    return {
        "all": _common.Table(
            "last_bits: trainings whose parameters differ from those without donation",
            ("training", f"different, of {count}", "by at most"),
            [(row["way"], str(row["different"]), f"{row['largest']:.1e}") for row in result["rows"]],
            _common.aim(result),
        )
    }


@click.command()
@click.option("--count", default=150, show_default=True, help="Trainings of each kind.")
@click.option("--child", nargs=3, default=None, hidden=True)
@_common.tiny_option
@_common.results_option
def main(count: int, child: tuple[str, str, str] | None, tiny: bool, results: Path) -> None:
    """Last bits of small trainings."""
    if child is not None:
        torch.save(train_all(child[0], child[1], count), child[2])
        return
    count = 3 if tiny else count
    plain = {loop: trained(loop, "plain", False, count) for loop in ("functions", "torch.optim")}
    rows = []
    for name, (loop, way, keep_order) in WAYS.items():
        largest = [
            max(float((a - b).abs().max()) for a, b in zip(one, other))
            for one, other in zip(plain[loop], trained(loop, way, keep_order, count))
        ]
        rows.append({"way": name, "different": sum(value != 0 for value in largest), "largest": max(largest)})
    result = _common.describe("last_bits", {"tiny": tiny, "trainings": count})
    result["rows"] = rows
    kept = sum(row["different"] for row in rows if "order kept" in row["way"])
    result["aim"] = {"text": "with TORCH_XLA_DONATE_KEEP_ORDER=1 all bits are equal", "met": kept == 0}
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
