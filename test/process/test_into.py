"""Pairs of donors and outputs in separate processes: the order in the HLO, copies, and outputs that share a buffer."""

from __future__ import annotations

import torch
import torch_xla
from children import in_process, run_in_child
from helpers import pointer

from torch_xla_donate import donate_buffer, donation_report, hlo


def step_of_two_donors(crossed):
    p, m = torch.ones(64, 64).to("xla"), torch.zeros(64, 64).to("xla")
    torch_xla.sync(wait=True)
    new_m = 0.9 * m + p.sum()
    new_p = p - 0.1 * new_m
    donate_buffer([p, m], into=[new_m, new_p] if crossed else None)
    torch_xla.sync(wait=True)


def test_into_can_ask_for_pairs_that_cross(tmp_path):
    """Without `into=` each donor goes to the output computed from it. A request for crossing pairs costs copies."""
    copies = {}
    for crossed in (True, False):
        folder = tmp_path / str(crossed)
        run_in_child(step_of_two_donors, crossed, dump=folder)
        (module,) = hlo.read_dump(folder)
        assert len(module.aliases) == 2
        copies[crossed] = module.after.path.read_text().count(" copy(")
    assert copies[True] > copies[False]


@in_process
def test_a_pair_is_kept_where_other_outputs_share_a_buffer():
    """As after updates in place whose values are kept by detach(): the executor has several outputs of one id."""
    counter, source, other = (torch.arange(float(size)).to("xla") for size in (7, 5, 5))
    torch_xla.sync(wait=True)
    kept = []
    for _ in range(3):
        counter.add_(1)
        kept.append(counter.detach())
    counter.add_(1)
    result = source * 2
    places = pointer(source), pointer(other)
    other.add_(1)
    donate_buffer(source, into=result)
    torch_xla.sync(wait=True)
    (donor,) = donation_report(steps=1).donors
    assert donor.outcome == "donated" and donor.into_kept
    assert (pointer(result), pointer(other)) == places


@in_process(env={"TORCH_XLA_DONATE_KEEP_ORDER": "1"})
def test_a_kept_order_leaves_the_graph_and_says_what_crosses(dump_folder):
    """A pair that crosses is copied: values stay right, and the tensor moves."""
    w = torch.ones(4, 6).to("xla")
    torch_xla.sync(wait=True)
    place = pointer(w)
    kept = w.sum() + torch.zeros(24, device="xla")
    new = w + 1
    donate_buffer(w)
    torch_xla.sync(wait=True)
    (donor,) = donation_report(steps=1).donors
    assert donor.outcome == "donated" and donor.crossed
    assert pointer(kept) == place != pointer(new)
    assert (kept.unique().tolist(), new.unique().tolist()) == ([24.0], [2.0])
    (graph,) = [module for module in hlo.read_dump(dump_folder) if module.before and module.before.donors]
    assert [shape.dims for shape in graph.before.result.elements] == [(24,), (4, 6)]
