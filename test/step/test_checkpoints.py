"""Checkpoints before, during and after donation: right, or our error; and donation in the first step after loading."""

from __future__ import annotations

import numpy
import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
import torch_xla
import torch_xla.core.xla_model as xm
from children import in_process
from helpers import pointer
from torch.distributed.checkpoint.api import CheckpointException

from torch_xla_donate import _C, DonatedBufferError, compile, donate_buffer, is_donated

# The warnings of torch and torch_xla when they write a distributed checkpoint without a process group.
pytestmark = pytest.mark.filterwarnings("ignore:.*(TypedStorage|single process|no_dist)")


def load_distributed(folder, like):
    state = {name: torch.zeros(*tensor.shape) for name, tensor in like.items()}
    distributed_checkpoint.load(state, checkpoint_id=folder)
    return state


SAVERS = {
    "torch.save": torch.save,
    "torch.save of a copy": lambda state, path: torch.save({k: v.cpu() for k, v in state.items()}, path),
    "xm.save": xm.save,
    "distributed": lambda state, path: distributed_checkpoint.save(state, checkpoint_id=path),
}


def loaded(name, path, like):
    state = load_distributed(path, like) if name == "distributed" else torch.load(path)
    return {key: tensor.cpu().tolist() for key, tensor in state.items()}


@pytest.fixture(params=SAVERS)
def saver(request):
    return request.param


@in_process  # torchax, once imported, breaks torch.distributed.checkpoint
def test_a_checkpoint_before_the_step_leaves_the_donation(make, saver, tmp_path):
    """It has the old values, and the step still donates."""
    save, state = SAVERS[saver], {"w": make(4), "b": make(2)}
    expected = {"w": [0, 1, 2, 3], "b": [0, 1]}
    first = pointer(state["w"])
    # WHEN the state is saved before it is marked, when it is marked, and when its step has been traced
    save(state, tmp_path / "before")
    donate_buffer(state)
    save(state, tmp_path / "marked")
    updated = {name: value + 1 for name, value in state.items()}
    save(state, tmp_path / "traced")
    # THEN all have the old values, and the step donates
    assert _C.sizes()["pending"] == 2
    torch_xla.sync()
    assert all(is_donated(value) for value in state.values())
    for moment in ("before", "marked", "traced"):
        assert loaded(saver, tmp_path / moment, state) == expected
    # AND the results can be saved while the step may still be running
    save(updated, tmp_path / "results")
    assert loaded(saver, tmp_path / "results", state) == {"w": [1, 2, 3, 4], "b": [1, 2]}
    assert pointer(updated["w"]) == first


@in_process  # torchax, once imported, breaks torch.distributed.checkpoint
def test_a_late_checkpoint_is_our_error_and_cannot_be_loaded(make, saver, tmp_path):
    state = {"w": make(4), "b": make(2)}
    donate_buffer(state)
    updated = {name: value + 1 for name, value in state.items()}
    torch_xla.sync()
    # WHEN what the step has consumed is saved
    with pytest.raises((DonatedBufferError, CheckpointException)) as caught:
        SAVERS[saver](state, tmp_path / "late")
    # THEN the error names the line of the donation
    error = caught.value
    if saver == "distributed":
        ((error, _),) = error.failures.values()
    assert isinstance(error, DonatedBufferError)
    assert "'w'" in str(error)
    assert "test_checkpoints.py" in str(error)
    # AND nothing can be loaded
    if saver in ("xm.save", "torch.save of a copy"):
        assert not (tmp_path / "late").exists()
    with pytest.raises((RuntimeError, FileNotFoundError, CheckpointException)):
        loaded(saver, tmp_path / "late", state)
    # AND other work is not lost
    assert updated["w"].tolist() == [1, 2, 3, 4]


def test_a_late_xm_save_leaves_the_checkpoint_before_it_alone(make, tmp_path):
    t = make(4)
    xm.save({"w": t}, tmp_path / "checkpoint")
    donate_buffer(t)
    updated = t + 1
    torch_xla.sync()
    with pytest.raises(DonatedBufferError):
        xm.save({"w": t}, tmp_path / "checkpoint")
    assert torch.load(tmp_path / "checkpoint")["w"].tolist() == [0, 1, 2, 3]
    assert updated.tolist() == [1, 2, 3, 4]


def test_a_copy_on_the_host_is_saved_later_than_the_step(make, tmp_path):
    state = {"w": make(4)}
    copy = {name: value.cpu() for name, value in state.items()}
    donate_buffer(state)
    updated = state["w"] * 10
    torch_xla.sync(wait=True)
    torch.save(copy, tmp_path / "copy")
    assert torch.load(tmp_path / "copy")["w"].tolist() == [0, 1, 2, 3]
    assert updated.tolist() == [0, 10, 20, 30]


# --- Loading ---


@pytest.mark.parametrize("kind", ["torch tensor", "numpy array", "mapped file", "module", "large"])
def test_the_first_step_after_loading_leaves_the_host_alone(kind, tmp_path):
    """It donates, and the host's values stay as they are."""
    size = 1 << 20 if kind == "large" else 16
    torch.save({"w": torch.arange(float(size))}, tmp_path / "checkpoint")
    host = torch.load(tmp_path / "checkpoint", mmap=kind == "mapped file")["w"]
    if kind == "numpy array":
        host = torch.from_numpy(numpy.arange(size, dtype=numpy.float32))
    if kind == "module":
        module = torch.nn.Linear(16, 1, bias=False)
        module.load_state_dict({"weight": host.reshape(1, 16)})
        weight = module.to("xla").weight.detach()
    else:
        weight = host.to("xla")
    # WHEN the first step after loading gives the weights up, without a sync before
    first = pointer(weight)
    donate_buffer(weight)
    updated = weight * -1
    torch_xla.sync(wait=True)
    # THEN their memory is the result's, and the host still has its own
    assert is_donated(weight)
    assert pointer(updated) == first != host.data_ptr()
    assert torch.equal(host, torch.arange(float(size)))
    assert torch.equal(torch.load(tmp_path / "checkpoint")["w"], host)
    assert torch.equal(updated.cpu().flatten(), host * -1)


def test_what_torch_load_puts_on_the_device_is_donated(make, tmp_path):
    torch.save({"w": make(4)}, tmp_path / "checkpoint")
    state = torch.load(tmp_path / "checkpoint")
    first = pointer(state["w"])
    donate_buffer(state)
    updated = state["w"] + 1
    torch_xla.sync()
    assert is_donated(state["w"])
    assert pointer(updated) == first
    assert updated.tolist() == [1, 2, 3, 4]


def test_the_first_call_after_loading_donates_the_optimizer(tmp_path):
    """And the module; the values are those of a run without the checkpoint."""

    def made():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 3).to("xla")
        return model, torch.optim.Adam(model.parameters())

    def tensors(model, optimizer):
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return [*model.parameters(), *moments]

    def values(model, optimizer):
        return [tensor.tolist() for tensor in tensors(model, optimizer)]

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
    expected = values(model, optimizer)
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
    assert values(model, optimizer) == expected
    assert {pointer(tensor) for tensor in tensors(model, optimizer)} == before


@in_process  # torchax, once imported, breaks torch.distributed.checkpoint
def test_a_distributed_checkpoint_loads_into_later_donors(make, tmp_path):
    distributed_checkpoint.save({"w": make(4)}, checkpoint_id=tmp_path / "checkpoint")
    state = {"w": make(4) * 0}
    torch_xla.sync()
    distributed_checkpoint.load(state, checkpoint_id=tmp_path / "checkpoint")
    torch_xla.sync()
    donate_buffer(state)
    updated = state["w"] + 1
    torch_xla.sync()
    assert is_donated(state["w"])
    assert updated.tolist() == [1, 2, 3, 4]


def test_loading_a_checkpoint_into_a_consumed_tensor_revives_it(make, tmp_path):
    model = torch.nn.Linear(2, 2).to("xla")
    torch_xla.sync()
    xm.save(model.state_dict(), tmp_path / "checkpoint")
    expected = model.weight.tolist()
    donate_buffer(model)
    updated = {name: value * 0 for name, value in model.state_dict().items()}
    torch_xla.sync()
    with pytest.raises(DonatedBufferError):
        model.weight.tolist()
    model.load_state_dict(torch.load(tmp_path / "checkpoint"))
    assert model.weight.tolist() == expected
    assert updated["weight"].tolist() == [[0, 0], [0, 0]]
