"""gradient_accumulation: what the train step donates, and the order of what it carries."""

from __future__ import annotations

import json

import pytest
import torch
import torch_xla
from helpers import dump_env, run_script
from torch_xla.experimental.gradient_accumulation import gradient_accumulation as host_gradient_accumulation

from torch_xla_donate import (
    DonationError,
    DonationWarning,
    donate_buffer,
    donation_report,
    gradient_accumulation,
    hlo,
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


def test_a_whole_training_step_aliases_every_parameter_gradient_and_moment_and_the_report_says_so(tmp_path):
    # GIVEN a transformer, AdamW, and gradients that stay: they are zeroed, not dropped
    # WHEN it accumulates, steps and zeroes in one step of the device, with and without marks
    script = run_script(
        """
        import json, torch, torch_xla
        from torch import nn
        from torch_xla_donate import donate_buffer, donation_report, gradient_accumulation

        def places(state):
            return [torch_xla._XLAC._unsafe_buffer_pointer(t) for tensors in state.values() for t in tensors.values()]

        def train(donate):
            torch.manual_seed(0)
            block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            model = nn.Sequential(nn.Embedding(16, 8), block, nn.Linear(8, 16)).to("xla")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            batches = torch.randint(16, (4, 2, 6)).to("xla")
            torch_xla.sync()
            losses, state, kept = [], None, False
            for step in range(4):
                if step:
                    state = {"gradients": {name: p.grad for name, p in model.named_parameters()}}
                    state["parameters"] = dict(model.named_parameters())
                    for moment in ("exp_avg", "exp_avg_sq"):
                        state[moment] = {n: optimizer.state[p][moment] for n, p in model.named_parameters()}
                    before = places(state)
                    if donate:
                        donate_buffer(state)
                loss = gradient_accumulation(
                    lambda x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()), (batches,), model
                )
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                torch_xla.sync(wait=True)
                losses.append(loss.item())
                kept = state is not None and sorted(places(state)) == sorted(before)
            tensors = [t for tensors in state.values() for t in tensors.values()]
            return {
                "losses": losses,
                "kept": kept,
                "values": [t.tolist() for t in tensors],
                "bytes": sum(t.nbytes for t in tensors),
                "tensors": len(tensors),
                "donors": [(donor.name, donor.outcome) for donor in donation_report(steps=1).donors],
            }

        print(json.dumps([train(donate=False), train(donate=True)]))
        """,
        env=dump_env(tmp_path),
        timeout=240,
    )
    plain, donate = json.loads(script.stdout.splitlines()[-1])
    # THEN every one of them is aliased, in the HLO and in memory
    assert plain["tensors"] == 4 * 15
    modules = [found for found in hlo.read_dump(tmp_path) if len(found.donors) >= plain["tensors"]]
    assert modules
    for found in modules:
        assert len(found.donors) == len(found.aliases) == plain["tensors"]
        assert found.aliased_bytes == plain["bytes"]
    assert plain["kept"] and donate["kept"]
    # THEN the report tells of those that were marked, and the values are the same
    assert plain["donors"] == []
    assert len(donate["donors"]) == plain["tensors"]
    assert {outcome for _, outcome in donate["donors"]} == {"donated"}
    assert {name.partition("]")[0] for name, _ in donate["donors"]} == {
        "['gradients'",
        "['parameters'",
        "['exp_avg'",
        "['exp_avg_sq'",
    }
    assert donate["losses"] == plain["losses"] == sorted(plain["losses"], reverse=True)
    assert donate["values"] == plain["values"]
