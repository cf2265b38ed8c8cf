"""Defects of stock torch_xla that `torch_xla_donate/_host/repairs.py` repairs. If a test fails, its repair may go."""

from __future__ import annotations

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from children import in_process
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan import scan


def test_carried_tensors_come_back_in_another_order(make):
    model, carried = torch.nn.Linear(4, 1).to("xla"), [make(2) + 100 * k for k in range(3)]
    torch_xla.sync()

    def step(batch, *carried):
        return (model(batch).sum(), *(tensor + k for k, tensor in enumerate(carried)))

    _, *found = gradient_accumulation(step, (make(3, 2, 4),), model, *carried)
    assert [tensor[0].item() for tensor in found] == [0, 206, 103]


@in_process(devices=4)
def test_each_iteration_of_spmd_gets_the_first_slice_with_a_scan() -> None:
    xr.use_spmd()
    model = torch.nn.ParameterDict({"rows": torch.arange(28.0).reshape(7, 4), "factors": torch.full((3, 4), 2.0)}).to(
        "xla"
    )
    tokens = torch.tensor([[[0, 1, 2, 3, 4]], [[2, 3, 4, 5, 6]]]).to("xla")
    torch_xla.sync(wait=True)

    def step(batch):
        rows = model["rows"][batch[:, :-1]]
        return scan(lambda carry, x: (carry * x, None), rows, model["factors"])[0].sum()

    gradient_accumulation(step, (tokens,), model)
    torch_xla.sync(wait=True)
    assert model["rows"].grad[:, 0].tolist() == [8, 8, 8, 8, 0, 0, 0]  # not [4, 4, 8, 8, 4, 4, 0]


def test_a_copy_in_a_graph_of_torch_compile_writes_into_an_argument(make):
    @torch.compile(backend="openxla")
    def stock(a, b):
        a.copy_(b)
        return a + 1

    a, b = make(3), make(3) + 5
    torch_xla.sync()
    with pytest.raises(IndexError):  # in the bridge, which takes the results for others
        stock(a, b)


def test_a_graph_of_torch_compile_returns_one_tensor_for_a_value_and_its_clone(make):
    @torch.compile(backend="openxla")
    def stock(a):
        b = a + 1
        return b, b.clone()

    b, clone = stock(make(3))
    assert b is clone
