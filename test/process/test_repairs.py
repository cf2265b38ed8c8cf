"""Stock torch_xla still has each defect that `csrc/repairs/` mends. If a test fails, a release has mended it."""

from __future__ import annotations

import bare
from children import run_in_child


def test_stock_torch_xla_still_confuses_graphs_of_other_wiring():
    """pytorch/xla#8353, `graph_wiring.h`. step/test_graph_hash.py shows the right values with the repair."""
    assert run_in_child(bare.graphs_of_other_wiring).value == [-5.0, -5.0, -5.0]  # the second should be -1.0
