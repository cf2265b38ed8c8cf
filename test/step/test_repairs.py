"""Defects of stock torch_xla that `torch_xla_donate/_host/repairs.py` repairs. If a test fails, its repair may go."""

from __future__ import annotations

import pytest
import torch
import torch_xla
from torch_xla.experimental.gradient_accumulation import gradient_accumulation


def test_carried_tensors_come_back_in_another_order(make):
    model, carried = torch.nn.Linear(4, 1).to("xla"), [make(2) + 100 * k for k in range(3)]
    torch_xla.sync()

    def step(batch, *carried):
        return (model(batch).sum(), *(tensor + k for k, tensor in enumerate(carried)))

    _, *found = gradient_accumulation(step, (make(3, 2, 4),), model, *carried)
    assert [tensor[0].item() for tensor in found] == [0, 206, 103]


def test_a_copy_in_a_graph_of_torch_compile_writes_into_an_argument(make):
    @torch.compile(backend="openxla")
    def stock(a, b):
        a.copy_(b)
        return a + 1

    a, b = make(3), make(3) + 5
    torch_xla.sync()
    with pytest.raises(IndexError):  # in the bridge, which takes the results for others
        stock(a, b)
