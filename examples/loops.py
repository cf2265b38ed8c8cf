"""Donates what loops on the device carry and go over: scan, scan_layers, gradient accumulation.

    python examples/loops.py

Each loop is one step. The table has the donors of each in XLA's dump.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch_xla
from _tpu import print_reuse
from rich.console import Console
from torch import nn

from torch_xla_donate import donate_buffer, gradient_accumulation, hlo, scan, scan_layers

LENGTH, WIDTH = 8, 512


def ready(*sizes: int) -> torch.Tensor:
    """A tensor with a buffer, as a donation needs it."""
    return torch.ones(*sizes).to("xla")


def plain_scan() -> list[torch.Tensor]:
    """The carry takes the memory of the first one, and the outputs that of the inputs."""
    total, sums = scan(
        lambda carry, x: (carry + x, carry * x), ready(WIDTH), ready(LENGTH, WIDTH), donate=("init", "xs")
    )
    return [total, sums]


def layers() -> list[torch.Tensor]:
    stack = [nn.Linear(WIDTH, WIDTH).to("xla") for _ in range(LENGTH)]
    with torch.no_grad():
        return [scan_layers(stack, ready(LENGTH, WIDTH), donate=True)]


def accumulation() -> list[torch.Tensor]:
    """The gradients keep their memory automatically. The carried tensor is donated."""
    model = nn.Linear(WIDTH, WIDTH).to("xla")

    def step(batch: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        donate_buffer(seen)
        return model(batch).pow(2).mean(), seen + batch.sum(0)

    loss, seen = gradient_accumulation(step, (ready(LENGTH, 4, WIDTH),), model, ready(WIDTH))
    return [loss, seen]


LOOPS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "scan": plain_scan,
    "scan_layers": layers,
    "gradient accumulation": accumulation,
}


@click.command(help=__doc__.partition("\n")[0])
@click.option("--out", default="out", show_default=True, type=click.Path(path_type=Path), help="Folder of XLA's dump.")
def main(out: Path) -> None:
    steps = {}
    dump = out / "loops_hlo"
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir(parents=True)
    # Before anything is computed: XLA reads its flags once.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text".strip()
    os.environ.update({"XLA_FLAGS": flags, "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU")})
    for name, loop in LOOPS.items():
        results = loop()  # They have to live until the step, or it would not compute them.
        torch_xla.sync(wait=True)
        del results
        steps[name] = hlo.read_dump(dump)[-1]
    print_reuse(Console(width=None if sys.stdout.isatty() else 100, highlight=False), steps)


if __name__ == "__main__":
    main()
