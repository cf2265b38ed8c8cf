"""Defects of torch_xla that are repaired.

Two graphs that connect their inputs differently never share an executable. The last tests show defects of stock
torch_xla that `torch_xla_donate/_host/repairs.py` repairs: if one fails, its repair may go.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_xla
from helpers import each_backend
from torch_xla.experimental.gradient_accumulation import gradient_accumulation

from torch_xla_donate import compile, donate_buffer, is_donated


def on_xla(*values: float, size: int = 3) -> list[torch.Tensor]:
    tensors = [torch.full((size, size), value).to("xla") for value in values]
    torch_xla.sync()
    return tensors


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # openxla keeps arguments that have views as results
@each_backend
def test_alike_views_of_swapped_inputs_stay_apart(options):
    """The order of outputs follows the age of tensors, so the second call connects two transposes the other way."""

    def f(a, d):
        v = a.clone()
        v[1] = 7.0
        return v, a.t(), d.t()

    step = compile(f, donate_argnums=(0, 1), **options)
    a, d = on_xla(1.0, 2.0)
    a, _, d = step(a, d)
    v, x, y = step(a, d)
    expected = torch.full((3, 3), 1.0)
    expected[1] = 7.0
    assert torch.equal(v.cpu(), torch.full((3, 3), 1.0).index_fill(0, torch.tensor(1), 7.0))
    assert torch.equal(x.cpu(), expected.t())
    assert torch.equal(y.cpu(), torch.full((3, 3), 2.0))


@pytest.mark.parametrize("donate", [False, True])
def test_a_graph_that_reads_another_input_is_another_graph(donate):
    """pytorch/xla#8353: stock torch_xla runs the first executable again for the second and third graph."""
    for last in ("t", "z", "t"):
        z, t = on_xla(3.0, 5.0)
        first, second = z + z, t - 2 * {"t": t, "z": z}[last]
        if donate:
            donate_buffer([z, t])
        torch_xla.sync()
        assert is_donated(z) == is_donated(t) == donate
        assert first.cpu().unique().tolist() == [6.0]
        assert second.cpu().unique().tolist() == [-5.0 if last == "t" else -1.0]


@pytest.mark.parametrize("op", [torch.t, torch.neg, lambda x: x[1:].sum(0), lambda x: x.reshape(-1)])
def test_every_assignment_of_alike_roots_is_right(op):
    """Three inputs and three roots that differ only in their input, beside a root that fixes the post-order."""
    for order in itertools.permutations(range(3)):
        inputs = on_xla(1.0, 2.0, 3.0, size=5)
        donate_buffer(inputs[:1])
        fixed = inputs[0] + 2 * inputs[1] + 4 * inputs[2]
        roots = [op(inputs[i]) for i in order]
        torch_xla.sync()
        assert is_donated(inputs[0]) and not is_donated(inputs[1])
        assert fixed.cpu().unique().tolist() == [17.0]
        for i, root in zip(order, roots):
            assert torch.equal(root.cpu(), op(torch.full((5, 5), float(i + 1))))


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
