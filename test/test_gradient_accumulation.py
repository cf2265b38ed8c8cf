"""gradient_accumulation: what the train step donates, and the order of what it carries."""

from __future__ import annotations

import pytest
import torch
import torch_xla
from torch_xla.experimental.gradient_accumulation import gradient_accumulation as host_gradient_accumulation

from torch_xla_donate import (
    DonationError,
    DonationWarning,
    donate_buffer,
    donation_report,
    gradient_accumulation,
    is_donated,
)


def model_of(width: int = 4) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(width, 1).to("xla")


def counted(model):
    """A step that adds 1 to the first carried tensor, 2 to the second, and so on."""
    return lambda x, *carried: (model(x).sum(), *[t + k for k, t in enumerate(carried, start=1)])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_carried_tensors_come_back_in_their_order(make, count):
    model, data = model_of(), make(3, 2, 4)
    carried = [make(2) + 100 * k for k in range(count)]
    torch_xla.sync()
    _, *result = gradient_accumulation(counted(model), (data,), model, *carried)
    assert [t[0].item() for t in result] == [100 * k + 3 * (k + 1) for k in range(count)]


def test_the_order_of_torch_xla_itself_is_another(make):
    # The reason for the reordering: should torch_xla change, so must this package.
    model, carried = model_of(), [make(2) + 100 * k for k in range(3)]
    torch_xla.sync()
    _, *result = host_gradient_accumulation(counted(model), (make(3, 2, 4),), model, *carried)
    assert [t[0].item() for t in result] == [3, 209, 106]


def test_the_step_donates_what_it_carries_and_what_it_iterates_over(make):
    model, data, first, second = model_of(), make(3, 4), make(3, 5), make(5)

    def step(x, big, small):
        donate_buffer([x, big])
        return model(x).sum(), big * 2, small + 1

    with pytest.warns(DonationWarning, match=r"iterable_tensors\[0\]: no output of the step has its size"):
        loss, big, small = gradient_accumulation(step, (data,), model, first, second)
        torch_xla.sync()
        outcome = {donor.name: donor.outcome for donor in donation_report(steps=1).donors}
    assert (is_donated(first), is_donated(second)) == (True, False)
    assert big[0, 1].item() == 8 and small[0].item() == 3
    assert outcome == {"carried_tensors[0]": "donated", "iterable_tensors[0]": "unusable"}


def test_arguments_are_donated_from_outside(make):
    model, carried = model_of(), [make(6), make(7)]
    kept = gradient_accumulation(counted(model), (make(3, 2, 4),), model, *carried, donate="carried_tensors")
    torch_xla.sync()
    del kept
    assert all(map(is_donated, carried))
    with pytest.raises(ValueError, match='it takes "iterable_tensors", "carried_tensors" or both'):
        gradient_accumulation(counted(model), (make(3, 2, 4),), model, donate="model")


def test_gradients_are_those_of_torch_xla_and_existing_ones_keep_their_memory(make):
    def run(function):
        model = model_of()
        losses = []
        for _ in range(3):
            before = model.weight.grad
            pointer = None if before is None else torch_xla._XLAC._unsafe_buffer_pointer(before)
            losses.append(function(lambda x: model(x).pow(2).sum(), (make(3, 2, 4),), model).item())
            torch_xla.sync(wait=True)
            if pointer is not None:
                assert torch_xla._XLAC._unsafe_buffer_pointer(model.weight.grad) == pointer
        return losses, model.weight.grad.cpu()

    losses, gradient = run(gradient_accumulation)
    expected_losses, expected = run(host_gradient_accumulation)
    assert losses == expected_losses and torch.equal(gradient, expected)


def test_a_carried_tensor_that_the_step_does_not_read_is_refused(make):
    model = model_of()
    with pytest.raises(ValueError, match=r"carried_tensors\[1\] is not read by the train step"):
        gradient_accumulation(
            lambda x, a, b: (model(x).sum(), a + 1, torch.zeros(2, device="xla")),
            (make(3, 2, 4),),
            model,
            make(2),
            make(2),
        )
    torch_xla.sync()


def test_a_pending_carried_tensor_is_computed_first_and_what_the_step_makes_cannot_be_donated(make):
    model = model_of()

    def step(x, a):
        donate_buffer(a * 1)
        return model(x).sum(), a + 1

    with pytest.raises(DonationError, match="not materialised"):
        gradient_accumulation(step, (make(3, 2, 4),), model, make(2))
    torch_xla.sync()
    pending = make(2) + 1
    kept = gradient_accumulation(counted(model), (make(3, 2, 4),), model, pending, donate="carried_tensors")
    torch_xla.sync()
    del kept
    assert is_donated(pending)
