"""Use after donation: an error at the line that touches the tensor, and nothing else lost."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from helpers import consume

from torch_xla_donate import _C, DonatedBufferError, donate_buffer, is_donated


@pytest.fixture
def donated(make):
    """A float32[4,4] that a step has just consumed, without a wait for the device."""
    t, other = make(4, 4), make(2)
    t.result, t.other = consume(t, lambda t: t * 2), other
    return t


USES = {
    "add": lambda t: t + 1,
    "matmul": lambda t: t @ t,
    "reduce": lambda t: t.sum(),
    "clone": lambda t: t.clone(),
    "contiguous op on a row": lambda t: t[1] + 1,
    "reshape": lambda t: t.reshape(-1),
    "foreach": lambda t: torch._foreach_add([t], 1),
    "index copy": lambda t: t.index_copy_(0, torch.zeros(1, dtype=torch.int64, device="xla"), t[:1]),
    "out=": lambda t: torch.add(t, 1, out=torch.empty(4, 4, device="xla")),
    "repr": repr,
    "cpu": lambda t: t.cpu(),
    "item": lambda t: t[0, 0].item(),
    "tolist": lambda t: t.tolist(),
    "equal": lambda t: torch.equal(t, t),
    "torch.save": lambda t: torch.save({"t": t}, io.BytesIO()),
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "xm.save": lambda t: xm.save({"t": t}, io.BytesIO()),
    "read by a function of torch_xla": lambda t: torch_xla._XLAC._xla_get_cpu_tensors([t]),
    "synced by a function of torch_xla": lambda t: torch_xla._XLAC._xla_sync_multi([t], []),
    "dlpack": lambda t: torch_xla.utils.dlpack.to_dlpack(t),
    "donate again": lambda t: donate_buffer([t.other, t]),
}


# torch_xla's own pybind11 functions. Before 2.9 they were built with another pybind11 than torch, whose list of
# exceptions is not ours: the text is the same, the type is RuntimeError.
OF_TORCH_XLA = {"xm.save", "read by a function of torch_xla", "synced by a function of torch_xla", "dlpack"}


@pytest.mark.parametrize("name", USES)
def test_every_use_raises_at_its_line_and_pending_work_survives(make, donated, name):
    use = USES[name]
    old = name in OF_TORCH_XLA and not torch_xla.__version__.startswith("2.9")
    other = make(3) + 1
    expected = (
        r"f32\[4,4\] tensor was donated at .*test_use_after_donation.py:\d+ "
        r"and step \d+ reused its memory\. Use the step's result, or"
    )
    with pytest.raises(RuntimeError if old else DonatedBufferError, match=expected):
        use(donated)
    assert _C.pending() == []
    torch_xla.sync(wait=True)
    assert other.tolist() == [1, 2, 3]
    assert donated.result[0].tolist() == [0, 2, 4, 6]


def test_the_message_names_the_line_of_the_donation_and_the_leaf(make):
    state, module = {"layer": [make(2)]}, torch.nn.Linear(2, 3).to("xla")
    torch_xla.sync()
    donate_buffer(state)
    line = inspect.currentframe().f_lineno - 1
    donate_buffer(module)
    _ = state["layer"][0] + 1, [p.detach() * 2 for p in module.parameters()]
    torch_xla.sync()
    leaf = r"f32\[2\] tensor \"\['layer'\]\[0\]\" was donated at " + re.escape(f"{__file__}:{line} ")
    with pytest.raises(DonatedBufferError, match=leaf):
        state["layer"][0].cpu()
    with pytest.raises(DonatedBufferError, match="'weight' was donated at"):
        module(make(1, 2))
    for entry in module.state_dict().values():
        with pytest.raises(DonatedBufferError):
            entry.cpu()


def test_metadata_still_works(donated):
    assert donated.shape == (4, 4)
    assert donated.dtype is torch.float32
    assert donated.device.type == "xla"
    assert (donated.numel(), donated.dim(), donated.stride(), donated.is_contiguous()) == (16, 2, (4, 1), True)
    assert len(donated) == 4
    assert not donated.requires_grad
    assert torch.empty_like(donated, device="meta").shape == (4, 4)
    assert is_donated(donated)


def test_backward_before_the_step_is_right(make):
    weight = make(3).requires_grad_()
    loss = (weight * weight).sum()
    donate_buffer(weight)
    loss.backward()
    with torch.no_grad():
        new = weight - weight.grad
    torch_xla.sync()
    assert is_donated(weight)
    assert weight.grad.tolist() == [0, 2, 4]
    assert new.tolist() == [0, -1, -2]


def test_other_threads_get_the_error_too(donated):
    with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="was donated at") as raised:
        other.submit(donated.cpu).result()
    assert type(raised.value) is DonatedBufferError
