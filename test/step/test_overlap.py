"""What a step has consumed stays until the device has its next run: XLA's CPU client waits for a run to destroy it."""

from __future__ import annotations

import pytest
import torch_xla
import torch_xla.core.xla_model as xm

import torch_xla_donate
from torch_xla_donate import _C, donate_buffer


def consumed() -> int:
    """How many consumed buffers exist."""
    xm.wait_device_ops()
    torch_xla.sync()  # a step forgets those that are freed
    return _C.sizes()["consumed"]


def marked(tensors):
    donate_buffer(tensors)
    updated = [t + 1.0 for t in tensors]
    tensors.clear()
    torch_xla.sync()
    return updated


pure = torch_xla_donate.compile(lambda tensors: [t + 1.0 for t in tensors], donate_argnums=0, pure=True)


@pytest.mark.parametrize("update", [marked, pure])
def test_consumed_buffers_stay_until_the_next_run(make, update):
    one, five = [make(4)], [make(4) for _ in range(5)]
    for _ in range(2):  # the second call of each length has everything
        one, five = update(one), update(five)
    one = update(one)
    before = consumed() - 1
    for _ in range(2):
        five = update(five)
        assert consumed() == before + 5
    one = update(one)
    assert consumed() == before + 1
    assert [t.tolist() for t in (*one, *five)] == [[4.0, 5.0, 6.0, 7.0]] * 6
