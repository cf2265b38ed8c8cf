"""The first step after a checkpoint was loaded donates, and leaves the host alone."""

from __future__ import annotations

import numpy
import pytest
import torch
from helpers import consume, pointer


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
