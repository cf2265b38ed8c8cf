"""Defects of stock torch_xla that `csrc/repairs/` and `_host/repairs.py` mend. A test that fails tells of a mended one.

`step/test_repairs.py` has those that need no process.
"""

from __future__ import annotations

import bare
import pytest
import torch
from children import run_in_child
from helpers import needs_jax, spmd_scan_gradients


def test_stock_torch_xla_still_confuses_graphs_of_other_wiring() -> None:
    """pytorch/xla#8353, `graph_wiring.h`. step/test_repairs.py shows the right values with the repair."""
    assert run_in_child(bare.graphs_of_other_wiring).value == [-5.0, -5.0, -5.0]  # the second should be -1.0


@needs_jax
@spmd_scan_gradients
@pytest.mark.parametrize(
    ("package", "gradients"),
    [(False, [8, 8, 8, 8, 0, 0, 0]), (True, [4, 4, 8, 8, 4, 4, 0])],
    ids=["stock", "with the package"],
)
def test_each_iteration_of_spmd_gets_its_slice_with_a_scan(package: bool, gradients: list[float]) -> None:
    """torch_xla gives the first slice to every iteration."""
    loss, found = run_in_child(bare.accumulate_slices, package, devices=4).value
    assert found == gradients
    if package:
        rows = torch.arange(28.0).reshape(7, 4)
        assert loss == 8 * (rows[:4].sum() + rows[2:6].sum()).item() / 2
