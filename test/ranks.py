"""Functions for the ranks of torch_xla.launch, which spawned processes import by name; torchrun runs this file."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable

import pytest
import torch
import torch_xla
from helpers import consume, pointer

import torch_xla_donate
from torch_xla_donate import DonatedBufferError, expect_donated

_rank_main: Callable[[int], None] | None = None


def _run_rank(rank: int) -> None:
    """Runs the function that the forked process inherited: torch_xla.launch pickles what it is given."""
    try:
        assert _rank_main is not None
        _rank_main(rank)
    except BaseException:
        # Other ranks may wait for this one, without a limit of time: their process ends.
        traceback.print_exc()
        os._exit(1)


def launch(rank_main: Callable[[int], None]) -> None:
    global _rank_main
    _rank_main = rank_main
    torch_xla.launch(_run_rank, start_method="fork")


def make(*values: float) -> torch.Tensor:
    """A materialised tensor on this rank's device."""
    t = torch.tensor(values).to(torch_xla.device())
    torch_xla.sync(wait=True)
    return t


def donate_own_buffers(rank: int) -> None:
    """Five donating steps; prints the rank, the process and the thread."""
    weight = make(float(rank), 1.0, 2.0, 3.0)
    first = pointer(weight)
    with expect_donated(1.0):  # the report keeps 8 steps of all threads together
        for _ in range(5):
            updated = consume(weight)
            with pytest.raises(DonatedBufferError, match=r"ranks\.py"):
                weight + 1
            weight = updated
    assert pointer(weight) == first
    assert weight.tolist() == [rank + 5.0, 6.0, 7.0, 8.0]
    os.write(1, f"{json.dumps([rank, os.getpid(), threading.get_ident()])}\n".encode())


def donate_to_a_compiled_function(rank: int) -> None:
    """Three donating calls; prints the rank, the process and the result."""
    step = torch_xla_donate.compile(lambda state: {"w": state["w"] * 2}, donate_argnums=0)
    state = {"w": make(float(rank), 1.0)}
    first = pointer(state["w"])
    for _ in range(3):
        old, state = state, step(state)
        with pytest.raises(DonatedBufferError):
            old["w"].cpu()
    assert pointer(state["w"]) == first
    os.write(1, f"{json.dumps([rank, os.getpid(), state['w'].tolist()])}\n".encode())


if __name__ == "__main__":
    torch_xla.launch(donate_to_a_compiled_function)
