"""Trains with donation on batches of MpDeviceLoader, saves and loads a checkpoint; the first step after it donates."""

import tempfile
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla.distributed.parallel_loader import MpDeviceLoader

import torch_xla_donate
from torch_xla_donate import DonatedBufferError, donation_report


def loss(weights, x, y):
    hidden = torch.tanh(x @ weights["hidden"])
    return (hidden @ weights["out"] - y).square().mean()


@torch_xla_donate.compile(donate_argnames="state")
def train(state, x, y):
    weights = {name: value.detach().requires_grad_() for name, value in state["weights"].items()}
    error = loss(weights, x, y)
    gradients = dict(zip(weights, torch.autograd.grad(error, list(weights.values()))))
    with torch.no_grad():
        momentum = {name: 0.9 * value + gradients[name] for name, value in state["momentum"].items()}
        weights = {name: value - 0.02 * momentum[name] for name, value in state["weights"].items()}
    return {"weights": weights, "momentum": momentum}, error.detach()


def batches():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(256, 8, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    return MpDeviceLoader(torch.utils.data.DataLoader(data, batch_size=64), torch_xla.device())


def new_state():
    generator = torch.Generator().manual_seed(1)
    weights = {"hidden": torch.randn(8, 64, generator=generator), "out": torch.randn(64, 1, generator=generator) / 8}
    return {"weights": weights, "momentum": {name: torch.zeros_like(value) for name, value in weights.items()}}


def to_device(state):
    state = torch.utils._pytree.tree_map(lambda value: value.to(torch_xla.device()), state)
    torch_xla.sync()
    return state


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "checkpoint.pt")

    state = to_device(new_state())
    for epoch in range(3):
        for x, y in batches():
            old, (state, error) = state, train(state, x, y)
        print(f"epoch {epoch}: loss {error.item():.4f}")

    # After the step its results are what there is to save. xm.save copies to the host before it opens the file.
    xm.save(state, path)
    try:
        xm.save(old, path)
    except DonatedBufferError as failure:
        print("too late:", str(failure).replace(__file__, Path(__file__).name).partition(". ")[0])

    # As after a restart.
    state = to_device(torch.load(path))
    x, y = next(iter(batches()))
    state, error = train(state, x, y)
    report = donation_report(steps=1)
    print(f"first step after loading: {len(report.donors)} donors, {report.reused_fraction:.0%} of their bytes reused")
