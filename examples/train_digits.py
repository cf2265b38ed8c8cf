"""Trains on scikit-learn's digits: plain, donating the old state, and with auto_donate(); shows what donation saves.

The training code is all in this file; `_measure.py` takes the measurements, `_show.py` draws them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import _show
import torch
import torch.nn.functional as F
import torch_xla
from _measure import Meter, Result
from sklearn.datasets import load_digits

from torch_xla_donate import donate_buffer, donation_report, set_auto_donate

Tensors = dict[str, torch.Tensor]
State = dict[str, Tensors]

# Each run does this with the old state once the new one is recorded. In your loop the second line is the whole change.
# `into=` names the new tensor for each old one's memory.
MODES: dict[str, Callable[[State, State], None]] = {
    "plain": lambda state, updated: None,
    "donate": lambda state, updated: donate_buffer(state, into=updated),
    "auto": lambda state, updated: None,  # as plain; `train` calls set_auto_donate(True) before the loop
}

CLASSES = 10
BATCH = 32
LEARNING_RATE, BETA1, BETA2 = 3e-4, 0.9, 0.999


def load_data(device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The 1,797 images as (images, labels) to train on, 1,437 of them, and to test on, the other 360."""
    digits = load_digits()
    order = torch.randperm(len(digits.data), generator=torch.Generator().manual_seed(0))
    images = (torch.from_numpy(digits.data).float() / 16)[order].to(device)
    labels = torch.from_numpy(digits.target)[order].to(device)
    split = len(order) * 4 // 5
    return (images[:split], labels[:split]), (images[split:], labels[split:])


def new_state(hidden: int, pixels: int, device: torch.device) -> State:
    """Parameters of a perceptron with two hidden layers, and Adam's two moments: few tensors, one of them large."""
    torch_xla.manual_seed(0)
    sizes = [pixels, hidden, hidden, CLASSES]
    params: Tensors = {}
    for i, (rows, columns) in enumerate(pairwise(sizes), start=1):
        params[f"w{i}"] = torch.randn(rows, columns, device=device) * (2 / rows) ** 0.5
        params[f"b{i}"] = torch.zeros(columns, device=device)
    moments = {name: {key: torch.zeros_like(p) for key, p in params.items()} for name in ("m", "v")}
    return {"params": params, **moments}


def predict(params: Tensors, images: torch.Tensor) -> torch.Tensor:
    x = torch.relu(images @ params["w1"] + params["b1"])
    x = torch.relu(x @ params["w2"] + params["b2"])
    return x @ params["w3"] + params["b3"]


def loss_of(params: Tensors, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(predict(params, images), labels)


def update(state: State, step: int, images: torch.Tensor, labels: torch.Tensor) -> tuple[State, torch.Tensor]:
    """One step of Adam: the new state, and the loss. The old state is only read.

    A separate function, so that the gradients are gone when it returns. A tensor that is still alive when the step
    runs becomes an output of it, takes memory, and competes with the new state for the donated buffers.
    """
    # Autograd's own thread may hold gradients into the step. The calling thread does not.
    with torch.autograd.set_multithreading_enabled(False):
        grads, loss = torch.func.grad_and_value(loss_of)(state["params"], images, labels)
    rate = LEARNING_RATE * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)

    m = {key: BETA1 * state["m"][key] + (1 - BETA1) * grad for key, grad in grads.items()}
    v = {key: BETA2 * state["v"][key] + (1 - BETA2) * grad * grad for key, grad in grads.items()}
    params = {key: p - rate * m[key] / (v[key].sqrt() + 1e-8) for key, p in state["params"].items()}
    return {"params": params, "m": m, "v": v}, loss


def train(mode: str, steps: int, hidden: int) -> Result:
    """Trains for some steps, donating the old state at each or not."""
    give_away = MODES[mode]
    if mode == "auto":
        set_auto_donate(True)  # This is the whole change. The loop has no line of donation.
    device = torch_xla.device()
    (images, labels), (test_images, test_labels) = load_data(device)
    torch_xla.sync(wait=True)

    meter = Meter(mode, steps)
    state = new_state(hidden, images.shape[1], device)
    torch_xla.sync()  # A tensor needs a buffer before it can be donated.
    meter.start(state)

    rows = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        batch = torch.randint(len(images), (BATCH,), generator=rows).to(device)
        with meter.step():
            updated, loss = update(state, step, images[batch], labels[batch])
            give_away(state, updated)  # Its last use is in this step, so the step may write the new state over it.
            state = updated
            torch_xla.sync()
        meter.note(state, loss)

    report = donation_report(steps=1)
    correct = predict(state["params"], test_images).argmax(1) == test_labels
    return meter.result(state, report, accuracy=correct.float().mean().item())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps of each run, 3 or more (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4800, help="width of the hidden layers (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the results (default: %(default)s)")
    parser.add_argument("--mode", choices=MODES, help="do this one run only, in this process")
    parser.add_argument("--result", type=Path, help="with --mode: a file for the measurements, as JSON")
    options = parser.parse_args()
    if options.steps < 3 or options.hidden < 1:
        parser.error(f"--steps is {options.steps} and --hidden {options.hidden}; they must be 3 and 1 or more")
    if options.mode is None:
        # Each run has a separate process. Memory is measured per process, and XLA reads its flags once.
        size = ("--steps", str(options.steps), "--hidden", str(options.hidden))
        demo = _show.Demo(
            script=Path(__file__),
            modes={mode: ("--mode", mode, *size) for mode in MODES},
            steps=options.steps,
            data="1,437 images of digits",
            state="parameters and two moments",
            title=f"Training on digits: memory over {options.steps} steps, without and with donation",
            score="accuracy on 360 test images",
        )
        return _show.compare(demo, options.out)
    result = train(options.mode, options.steps, options.hidden)
    if options.result is not None:
        result.save(options.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
