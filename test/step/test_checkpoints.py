"""The first step after a checkpoint was loaded donates, and computes what it does without one."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import consume, pointer

from torch_xla_donate import compile


@pytest.mark.parametrize("kind", ["torch tensor", "numpy array", "mapped file", "module", "large", "by torch.load"])
def test_the_first_step_after_loading_leaves_the_host_alone(kind, tmp_path):
    """It donates, and the host's values stay as they are."""
    size = 1 << 20 if kind == "large" else 16
    host = torch.arange(float(size))
    # torch.load puts a tensor on the device that it was saved from.
    torch.save({"w": host.to("xla") if kind == "by torch.load" else host}, tmp_path / "checkpoint")
    loaded = torch.load(tmp_path / "checkpoint", mmap=kind == "mapped file")["w"]
    if kind == "numpy array":
        loaded = torch.from_numpy(numpy.arange(size, dtype=numpy.float32))
    if kind == "module":
        module = torch.nn.Linear(16, 1, bias=False)
        module.load_state_dict({"weight": loaded.reshape(1, 16)})
        weight = module.to("xla").weight.detach()
    else:
        weight = loaded.to("xla")
    # WHEN the first step after loading gives the weights up, without a sync before
    first = pointer(weight)
    updated = consume(weight, torch.neg, wait=True)
    # THEN their memory is the result's, and the host still has its own
    assert pointer(updated) == first
    if kind != "by torch.load":
        assert first != loaded.data_ptr() and torch.equal(loaded, host)
    assert torch.equal(torch.load(tmp_path / "checkpoint")["w"].cpu(), host)
    assert torch.equal(updated.cpu().flatten(), host * -1)


def test_the_first_call_after_loading_donates_the_optimizer(tmp_path):
    """And the module; the values are those of a run without the checkpoint."""

    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3).to("xla")
        return model, torch.optim.Adam(model.parameters())

    def tensors(model, optimizer):
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*model.parameters(), *moments]

    def step(model, optimizer, batch):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # GIVEN a checkpoint after one step, and what the next step gives
    batch = torch.ones(2, 3).to("xla")
    model, optimizer = made()
    step(model, optimizer, batch)
    torch_xla.sync()
    xm.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
    step(model, optimizer, batch)
    expected = [tensor.tolist() for tensor in tensors(model, optimizer)]
    # WHEN another process would load it, and give both up in its first step
    model, optimizer = made()
    saved = torch.load(tmp_path / "checkpoint")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    donating = compile(step, donate_argnames=("model", "optimizer"))
    torch_xla.sync()
    before = {pointer(tensor) for tensor in tensors(model, optimizer)}
    donating(model, optimizer, batch)
    # THEN the values are the same, in the same memory
    assert [tensor.tolist() for tensor in tensors(model, optimizer)] == expected
    assert {pointer(tensor) for tensor in tensors(model, optimizer)} == before
