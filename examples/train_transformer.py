"""Trains a small GPT on the sources of the running Python: a scan over the layers, gradient accumulation, AdamW.

AdamW is a function here. It makes new parameters and moments and keeps the old ones. torch_xla aliases none of them
automatically. With `--donate` the old state is donated, with `--no-donate` it is not; without either both are run,
each in a separate process, and compared.

    python examples/train_transformer.py             # both: values, HLO, bytes per device, pictures in out/
    python examples/train_transformer.py --donate    # one run, which ends with the donation report
"""

from __future__ import annotations

import sys
from pathlib import Path

import _show
import click
import gpt
import torch
import torch_xla
from _measure import Meter
from torch import nn

from torch_xla_donate import donate_buffer, donation_report, gradient_accumulation

State = dict[str, gpt.Tensors]

LEARNING_RATE, BETA1, BETA2, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 0.1


def new_state(size: gpt.Size, device: torch.device) -> State:
    """The parameters and AdamW's two moments."""
    params = {name: p.to(device) for name, p in gpt.new_params(size).items()}
    moments = {moment: {name: torch.zeros_like(p) for name, p in params.items()} for moment in ("m", "v")}
    return {"params": params, **moments}


def gradients(params: gpt.Tensors, batches: torch.Tensor, size: gpt.Size) -> tuple[gpt.Tensors, torch.Tensor]:
    """Gradients and mean loss of `batches` [count, batch, time + 1]; a loop on the device goes over them."""
    model = nn.ParameterDict(params)
    loss = gradient_accumulation(lambda batch: gpt.loss_of(dict(model.items()), batch, size), (batches,), model)
    return {name: p.grad for name, p in model.items()}, loss


@torch.no_grad()
def adamw(state: State, grads: gpt.Tensors, step: int) -> State:
    """One step of AdamW: the new state. The old one is only read."""
    rate = LEARNING_RATE * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
    keep = 1 - LEARNING_RATE * WEIGHT_DECAY
    m = {name: BETA1 * state["m"][name] + (1 - BETA1) * grad for name, grad in grads.items()}
    v = {name: BETA2 * state["v"][name] + (1 - BETA2) * grad * grad for name, grad in grads.items()}
    params = {name: keep * p - rate * m[name] / (v[name].sqrt() + 1e-8) for name, p in state["params"].items()}
    return {"params": params, "m": m, "v": v}


def update(state: State, step: int, batches: torch.Tensor, size: gpt.Size) -> tuple[State, torch.Tensor]:
    """One training step. A separate function, so that the gradients are gone before the step runs."""
    grads, loss = gradients(state["params"], batches, size)
    return adamw(state, grads, step), loss


def train(donate: bool, steps: int, batch: int, accumulate: int, size: gpt.Size, result: Path | None) -> None:
    device = torch_xla.device()
    text = torch.frombuffer(bytearray(gpt.read_text()), dtype=torch.uint8).long()
    places = torch.Generator().manual_seed(1)
    window = torch.arange(size.context + 1)

    meter = Meter("donate" if donate else "plain", steps)
    state = new_state(size, device)
    torch_xla.sync()  # A tensor needs a buffer before it can be donated.
    meter.start(state)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - size.context, (accumulate, batch, 1), generator=places)
        batches = text[starts + window].to(device)
        with meter.step():
            updated, loss = update(state, step, batches, size)
            if donate:
                donate_buffer(state, into=updated)  # Each new tensor takes its old one's memory.
            state = updated
            torch_xla.sync()
        meter.note(state, loss)

    meter.finish(state, donation_report(steps=1), result)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--donate/--no-donate", default=None, help="One run with or without donation; default: both, compared.")
@click.option("--steps", default=30, show_default=True, type=click.IntRange(min=3))
@click.option("--batch", default=2, show_default=True, type=click.IntRange(min=1), help="Sequences of a micro batch.")
@click.option("--accumulate", default=4, show_default=True, type=click.IntRange(min=1), help="Micro batches of a step.")
@click.option("--layers", default=4, show_default=True, type=click.IntRange(min=1))
@click.option("--width", default=256, show_default=True, type=click.IntRange(min=4), help="A multiple of 4, the heads.")
@click.option("--context", default=64, show_default=True, type=click.IntRange(min=2), help="Bytes of a sequence.")
@click.option("--out", default="out", show_default=True, type=click.Path(path_type=Path), help="Folder of the results.")
@click.option("--result", type=click.Path(path_type=Path), help="Of one run: a file for the measurements, as JSON.")
def main(
    donate: bool | None,
    steps: int,
    batch: int,
    accumulate: int,
    layers: int,
    width: int,
    context: int,
    out: Path,
    result: Path | None,
) -> None:
    size = gpt.Size(layers=layers, width=width, context=context)
    if donate is not None:
        train(donate, steps, batch, accumulate, size, result)
        return
    same = ("--steps", steps, "--batch", batch, "--accumulate", accumulate)
    same += ("--layers", layers, "--width", width, "--context", context)
    demo = _show.Demo(
        script=Path(__file__),
        modes={mode: (flag, *map(str, same)) for mode, flag in (("plain", "--no-donate"), ("donate", "--donate"))},
        steps=steps,
        data=f"{len(gpt.read_text()):,} bytes of Python's own sources",
        state="parameters and two moments",
        title=f"A small GPT: memory over {steps} steps, without and with donation",
        curve=True,
    )
    sys.exit(_show.compare(demo, out))


if __name__ == "__main__":
    main()
