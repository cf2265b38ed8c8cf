"""What a run has consumed stays until the device has its next run: XLA's CPU client waits for a run to destroy it."""

from __future__ import annotations

import pytest
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import pointer

import torch_xla_donate
from torch_xla_donate import _C, donate_buffer


def just_consumed() -> int:
    """How many buffers stay, when nothing runs any more."""
    xm.wait_device_ops()
    return _C.sizes()["just_consumed"]


def marked(tensors):
    donate_buffer(tensors)
    updated = [t + 1.0 for t in tensors]
    tensors.clear()
    torch_xla.sync()
    return updated


pure = torch_xla_donate.compile(lambda tensors: [t + 1.0 for t in tensors], donate_argnums=0, pure=True)


@pytest.mark.parametrize("update", [marked, pure])
def test_consumed_buffers_stay_until_the_next_run(make, update):
    """A run that donates nothing ends them, and the hooks rest."""
    other = make(4)
    tensors = [make(4) for _ in range(5)]
    before = _C.sizes()["consumed"]  # tensors of other tests that still wait for the garbage collector
    for _ in range(3):
        memory = pointer(tensors[0])
        tensors = update(tensors)
        assert just_consumed() == 5
        assert pointer(tensors[0]) == memory  # and the array itself is not one of them
    for _ in range(2):
        other = other * 2
        torch_xla.sync()
        assert just_consumed() == 0
    assert _C.sizes()["consumed"] <= before
    assert [t.tolist() for t in tensors] == [[3.0, 4.0, 5.0, 6.0]] * 5
