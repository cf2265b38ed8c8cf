"""Checkpoints in separate processes: the HLO of the first step after loading, and sharded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.experimental.distributed_checkpoint as xc
from children import in_process
from helpers import consume, make, pointer
from sharding import mesh, shard
from torch.distributed.checkpoint.api import CheckpointException

from torch_xla_donate import _C, DonatedBufferError, donate_buffer, is_donated

State = dict[str, torch.Tensor]


# --- Each way to save. torchax, once imported, breaks torch.distributed.checkpoint: so these are in processes. ---

SAVERS: dict[str, Callable[[State, Path], object]] = {
    "torch.save": torch.save,
    "torch.save of a copy": lambda state, path: torch.save({k: v.cpu() for k, v in state.items()}, path),
    "xm.save": xm.save,
    "distributed": lambda state, path: dcp.save(state, checkpoint_id=path),
}


def loaded(saver: str, path: Path) -> dict[str, list[float]]:
    if saver == "distributed":
        state = {"w": torch.zeros(4), "b": torch.zeros(2)}
        dcp.load(state, checkpoint_id=path)
    else:
        state = torch.load(path)
    return {key: tensor.cpu().tolist() for key, tensor in state.items()}


@pytest.mark.parametrize("saver", SAVERS)
@in_process
def test_a_checkpoint_before_the_step_leaves_the_donation_and_a_late_one_raises(saver, tmp_path):
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
        assert loaded(saver, tmp_path / moment) == expected
    # AND what the step has consumed cannot be saved, nor loaded
    check_is_too_late(lambda: save(state, tmp_path / "late"))
    if saver in ("xm.save", "torch.save of a copy"):
        assert not (tmp_path / "late").exists()
    with pytest.raises((RuntimeError, FileNotFoundError, CheckpointException)):
        loaded(saver, tmp_path / "late")
    # AND the results can be saved while the step may still be running
    save(updated, tmp_path / "results")
    assert loaded(saver, tmp_path / "results") == {"w": [1, 2, 3, 4], "b": [1, 2]}
    assert pointer(updated["w"]) == first
    # AND what a distributed checkpoint was loaded into is donated
    if saver == "distributed":
        dcp.load(updated, checkpoint_id=tmp_path / "before")
        torch_xla.sync()
        again = consume(updated, lambda state: {name: value + 1 for name, value in state.items()})
        assert again["w"].tolist() == [1, 2, 3, 4]


# --- Of sharded tensors, in a process group ---


def start_group(folder: Path) -> None:
    mesh()
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)


def sharded(first: float) -> State:
    t = shard(torch.arange(8.0).to("xla") + first, "x")
    torch_xla.sync(wait=True)
    return {"w": t}


def save(state: State, path: Path) -> None:
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
    dcp.save(state, storage_writer=writer, planner=xc.SPMDSavePlanner())


def load(path: Path) -> State:
    state = sharded(100.0)
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=xc.SPMDLoadPlanner())
    return state


def check_is_too_late(save: Callable[[], object]) -> None:
    with pytest.raises((CheckpointException, DonatedBufferError)) as caught:
        save()
    found = caught.value
    if isinstance(found, CheckpointException):
        ((found, _),) = found.failures.values()
    assert isinstance(found, DonatedBufferError)
    assert "test_checkpoints.py" in str(found)


pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, about checkpoints in one process


@in_process(devices=4)
def test_sharded_checkpoints_are_right_or_raise(tmp_path):
    start_group(tmp_path)
    # While they are marked, after the step, and its results.
    old = sharded(1.0)
    donate_buffer(old)
    save(old, tmp_path / "marked")
    new = {"w": old["w"] * 2}
    torch_xla.sync()
    assert is_donated(old["w"])
    check_is_too_late(lambda: save(old, tmp_path / "late"))
    assert not (tmp_path / "late" / ".metadata").exists()
    save(new, tmp_path / "results")
    assert load(tmp_path / "marked")["w"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    state = load(tmp_path / "results")
    assert state["w"].tolist() == [2, 4, 6, 8, 10, 12, 14, 16]
    # The first step after loading.
    assert consume(state["w"]).tolist() == [3, 5, 7, 9, 11, 13, 15, 17]
    # torch's own asynchronous checkpoints do not take XLA tensors, donated or not.
    with pytest.raises((RuntimeError, CheckpointException), match="invalid python storage"):  # 2.9, 2.8
        dcp.async_save(sharded(1.0), checkpoint_id=tmp_path / "unsupported").result()
    # Of a copy on the host it may still run when the tensor is donated.
    plain = sharded(1.0)["w"]
    writer = dcp.FileSystemWriter(tmp_path / "async", per_thread_copy_ahead=0)
    future = dcp.async_save({"w": plain.cpu()}, storage_writer=writer)
    consume(plain, lambda w: w * 2)
    future.result()
    state = {"w": torch.zeros(8)}
    dcp.load(state, checkpoint_id=tmp_path / "async")
    assert state["w"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


@in_process(devices=4)
def test_the_managers_checkpoints_are_right_or_raise(tmp_path):
    start_group(tmp_path)
    # torch_xla's manager has its own copy on the host when save_async returns.
    manager = xc.CheckpointManager(str(tmp_path / "managed"), save_interval=1, chkpt_on_preemption=False)
    old = sharded(1.0)
    assert manager.save_async(0, old)
    new = consume(old, lambda state: {"w": state["w"] * 2})
    manager.join()
    assert manager.save(1, new)
    check_is_too_late(lambda: manager.save(2, old))
    check_is_too_late(lambda: manager.save_async(2, old))
    assert manager.all_steps() == [0, 1]
    state = sharded(100.0)
    for number, expected in ((0, 1.0), (1, 2.0)):
        manager.restore(number, state)
        assert state["w"][0].item() == expected
