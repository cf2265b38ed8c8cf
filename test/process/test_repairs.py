"""Defects of stock torch_xla that `csrc/repairs/` and `_host/repairs.py` mend. A test that fails tells of a mended one.

`step/test_repairs.py` has those that need no process.
"""

from __future__ import annotations

import bare
import torch
import torch_xla
import torch_xla.runtime as xr
from children import in_process, run_in_child
from helpers import lacking, needs_jax
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan import scan


def test_stock_torch_xla_still_confuses_graphs_of_other_wiring() -> None:
    """pytorch/xla#8353, `graph_wiring.h`. step/test_graph_hash.py shows the right values with the repair."""
    assert run_in_child(bare.graphs_of_other_wiring).value == [-5.0, -5.0, -5.0]  # the second should be -1.0


@needs_jax
@lacking("2.8", "XLA refuses the backward pass of a scan under SPMD, as its shard_alike has no sharding")
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
