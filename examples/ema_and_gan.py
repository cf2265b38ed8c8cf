"""Trains a GAN on scikit-learn's digits: two optimizers and a moving average of the generator, donated as one state.

Each step makes a new state: generator and discriminator, the two moments of an Adam for each, and the average (EMA) of
the generator's weights. Nothing is updated in place, so torch_xla aliases none of it automatically.
`donate_buffer(state, into=updated)` donates the whole old state, and names the new tensor for each old one's memory.

    python examples/ema_and_gan.py             # with and without donation, compared; pictures in out/
    python examples/ema_and_gan.py --donate    # one run, which ends with the donation report
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import _show
import click
import torch
import torch.nn.functional as F
import torch_xla
from _measure import Meter
from sklearn.datasets import load_digits

from torch_xla_donate import donate_buffer, donation_report

Tensors = dict[str, torch.Tensor]
State = dict[str, Tensors]

BATCH, NOISE, PIXELS = 64, 16, 64
RATE, BETA1, BETA2, DECAY = 2e-4, 0.5, 0.999, 0.99


def perceptron(sizes: list[int], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    params: Tensors = {}
    for i, (rows, columns) in enumerate(pairwise(sizes), start=1):
        params[f"w{i}"] = torch.randn(rows, columns, generator=generator) * (2 / rows) ** 0.5
        params[f"b{i}"] = torch.zeros(columns)
    return params


def new_state(hidden: int, device: torch.device) -> State:
    """Both networks, their moments, and the average, which begins as a copy of the generator."""
    g, d = perceptron([NOISE, hidden, hidden, PIXELS], seed=0), perceptron([PIXELS, hidden, hidden, 1], seed=1)
    state = {"g": g, "d": d, "ema": g}
    for name, params in (("g", g), ("d", d)):
        for moment in ("m", "v"):
            state[f"{name}_{moment}"] = {key: torch.zeros_like(p) for key, p in params.items()}
    return {name: {key: t.to(device) for key, t in tensors.items()} for name, tensors in state.items()}


def forward(params: Tensors, x: torch.Tensor) -> torch.Tensor:
    x = F.leaky_relu(x @ params["w1"] + params["b1"], 0.2)
    x = F.leaky_relu(x @ params["w2"] + params["b2"], 0.2)
    return x @ params["w3"] + params["b3"]


def adam(state: State, name: str, grads: Tensors, step: torch.Tensor) -> State:
    """The new parameters of `name` with their new moments."""
    rate = RATE * (1 - BETA2**step).sqrt() / (1 - BETA1**step)
    m = {key: BETA1 * state[f"{name}_m"][key] + (1 - BETA1) * grad for key, grad in grads.items()}
    v = {key: BETA2 * state[f"{name}_v"][key] + (1 - BETA2) * grad * grad for key, grad in grads.items()}
    params = {key: p - rate * m[key] / (v[key].sqrt() + 1e-8) for key, p in state[name].items()}
    return {name: params, f"{name}_m": m, f"{name}_v": v}


def update(state: State, step: torch.Tensor, images: torch.Tensor, noise: torch.Tensor) -> tuple[State, torch.Tensor]:
    """One step of both networks, and the losses [2] of discriminator and generator. The old state is only read."""

    def d_loss(d: Tensors) -> torch.Tensor:
        fake = torch.sigmoid(forward(state["g"], noise))
        return F.softplus(-forward(d, images)).mean() + F.softplus(forward(d, fake)).mean()

    def g_loss(g: Tensors, d: Tensors) -> torch.Tensor:
        return F.softplus(-forward(d, torch.sigmoid(forward(g, noise)))).mean()

    # Autograd's own thread may hold gradients for a moment longer, now and then into the step. This one does not.
    with torch.autograd.set_multithreading_enabled(False):
        d_grads, d_value = torch.func.grad_and_value(d_loss)(state["d"])
        new = adam(state, "d", d_grads, step)
        g_grads, g_value = torch.func.grad_and_value(g_loss)(state["g"], new["d"])
        new |= adam(state, "g", g_grads, step)
    new["ema"] = {key: DECAY * old + (1 - DECAY) * new["g"][key] for key, old in state["ema"].items()}
    # One tensor of both losses. On CPU no donor has its size; a single loss would take the memory of the smallest bias.
    return new, torch.stack([d_value, g_value])


def train(donate: bool, steps: int, hidden: int, result: Path | None) -> None:
    device = torch_xla.device()
    images = (torch.from_numpy(load_digits().data).float() / 16).to(device)
    random = torch.Generator().manual_seed(2)

    meter = Meter("donate" if donate else "plain", steps)
    state = new_state(hidden, device)
    torch_xla.sync(wait=True)
    meter.start(state)
    for number in range(1, steps + 1):
        # Not 0-d: torch_xla has one buffer for equal scalars. At step 20 this would also be the threshold of softplus,
        # after which torch_xla 2.9, also without this package, now and then computes other values.
        step = torch.tensor([float(number)]).to(device)
        batch = images[torch.randint(len(images), (BATCH,), generator=random).to(device)]
        noise = torch.randn(BATCH, NOISE, generator=random).to(device)
        with meter.step():
            updated, losses = update(state, step, batch, noise)
            if donate:
                donate_buffer(state, into=updated)
            state = updated
            torch_xla.sync()
        meter.note(state, losses[0])

    meter.finish(state, donation_report(steps=1), result)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--donate/--no-donate", default=None, help="One run with or without donation; default: both, compared.")
@click.option("--steps", default=40, show_default=True, type=click.IntRange(min=3))
@click.option("--hidden", default=1600, show_default=True, type=click.IntRange(min=1), help="Width of hidden layers.")
@click.option("--out", default="out", show_default=True, type=click.Path(path_type=Path), help="Folder of the results.")
@click.option("--result", type=click.Path(path_type=Path), help="Of one run: a file for the measurements, as JSON.")
def main(donate: bool | None, steps: int, hidden: int, out: Path, result: Path | None) -> None:
    if donate is not None:
        train(donate, steps, hidden, result)
        return
    same = ("--steps", str(steps), "--hidden", str(hidden))
    demo = _show.Demo(
        script=Path(__file__),
        modes={"plain": ("--no-donate", *same), "donate": ("--donate", *same)},
        steps=steps,
        data="1,797 images of digits",
        state="two networks, their moments, EMA",
        title=f"A GAN with a moving average: memory over {steps} steps, without and with donation",
        curve=True,
    )
    sys.exit(_show.compare(demo, out))


if __name__ == "__main__":
    main()
