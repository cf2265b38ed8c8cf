"""gradient_accumulation in processes of its own: the HLO of a training step, SPMD, eager mode."""

from __future__ import annotations

import pytest
import torch
import torch_xla
from children import in_process
from helpers import make, model_of, needs_jax, pointer
from sharding import mesh, shard
from torch import nn
from torch_xla.experimental.gradient_accumulation import gradient_accumulation as host_gradient_accumulation

from torch_xla_donate import (
    DonationError,
    compile,
    donate_buffer,
    donation_report,
    gradient_accumulation,
    hlo,
    is_donated,
    placeholder,
    scan,
)


@in_process(devices=4)
def test_under_spmd_the_carry_is_donated_and_aliased_per_device(dump_folder):
    mesh()

    def run(function, **options):
        model = model_of()
        data = shard(torch.arange(96.0).reshape(3, 8, 4).to("xla"), None, "x", None)
        carried = shard(torch.arange(32.0).reshape(8, 4).to("xla"), "x", None)
        torch_xla.sync(wait=True)
        loss, final = function(lambda x, a: (model(x).mean(), a * 2 + 1), (data,), model, carried, **options)
        torch_xla.sync(wait=True)
        return carried, [loss.cpu(), final.cpu(), model.weight.grad.cpu()]

    _, expected = run(host_gradient_accumulation)
    carried, found = run(gradient_accumulation, donate="carried_tensors")
    assert is_donated(carried)
    assert all(map(torch.equal, found, expected))
    (donor,) = donation_report(steps=1).donors
    assert (donor.name, donor.outcome, donor.bytes_per_device) == ("carried_tensors[0]", "donated", 32)
    aliased = [found.after for found in hlo.read_dump(dump_folder) if found.after is not None and found.after.aliases]
    assert [module.aliased_bytes for module in aliased] == [8 * 4 * 4 // 4]


@in_process(devices=4)
def test_under_spmd_a_step_that_reads_a_carried_tensor_itself_is_refused():
    mesh()
    model, data = model_of(), make(3, 8, 4)
    one, two = make(8, 4), shard(make(8, 4), "x", None)
    alias, row = two.detach(), two[0]
    for step in (
        lambda x, a, b: (model(x).mean(), a + two, b * 2),
        lambda x, a, b: (model(x).mean(), a + alias, b * 2),
        lambda x, a, b: (model(x).mean(), a + row, b * 2),
        lambda x, a, b: (model(x).mean(), a, b + torch.stack([a, two]).sum(0)),
        lambda x, a, b: (model(x).mean(), alias, b * 2),
    ):
        with pytest.raises(ValueError, match=r"the train step reads carried_tensors\[1\] itself"):
            gradient_accumulation(step, (data,), model, one, two)
    shaped = lambda x, a, b: (model(x).mean(), a.detach() + b[:] + torch.zeros(two.shape, device="xla"), b * 2)  # noqa: E731
    _, final, _ = gradient_accumulation(shaped, (data,), model, one, two)
    assert torch.equal(final.cpu(), one.cpu() + 7 * two.cpu())


def places(state):
    return sorted(pointer(t) for tensors in state.values() for t in tensors.values())


def train(donate):
    """Four steps of a transformer with AdamW, whose gradients stay: they are zeroed, not dropped."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(16, 8), block, nn.Linear(8, 16)).to("xla")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randint(16, (4, 2, 6)).to("xla")
    torch_xla.sync()
    losses, state = [], {}
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
    assert places(state) == before
    return losses, [t.cpu() for tensors in state.values() for t in tensors.values()]


@in_process
def test_a_training_step_aliases_its_whole_state(dump_folder):
    """Every parameter, gradient and moment, and the report says so."""
    # WHEN it accumulates, steps and zeroes in one step of the device, with and without marks
    plain_losses, plain = train(donate=False)
    assert not donation_report().donors
    losses, values = train(donate=True)
    # THEN every one of them is aliased, in the HLO and in memory
    assert len(plain) == 4 * 15
    modules = [found for found in hlo.read_dump(dump_folder) if len(found.donors) >= len(plain)]
    assert modules
    for found in modules:
        assert len(found.donors) == len(found.aliases) == len(plain)
        assert found.aliased_bytes == sum(t.nbytes for t in plain)
    # AND the report shows those that were marked, and the values are the same
    donors = donation_report(steps=1).donors
    assert len(donors) == len(plain)
    assert {donor.outcome for donor in donors} == {"donated"}
    assert {donor.name.split("'")[1] for donor in donors} == {"gradients", "parameters", "exp_avg", "exp_avg_sq"}
    assert losses == plain_losses == sorted(plain_losses, reverse=True)
    assert all(map(torch.equal, values, plain))


@in_process
def test_in_eager_mode_it_runs_in_a_compiled_function():
    """Elsewhere it is refused: torch_xla's own goes on with the values of the first iteration."""
    torch_xla.experimental.eager_mode(True)
    model, data, carried = model_of(), torch.ones(3, 2, 4).to("xla"), torch.zeros(2).to("xla")

    def accumulate(data, carried):
        return gradient_accumulation(
            lambda x, t: (model(x).mean(), t + 1), (data,), model, carried, donate="carried_tensors"
        )

    with pytest.raises(DonationError, match="gradient_accumulation is called in eager mode"):
        accumulate(data, carried)
    assert torch_xla.experimental.is_eager_mode()
    loss, result = compile(accumulate)(data, carried)
    assert result.tolist() == [3, 3] and torch.allclose(model.weight.grad.cpu(), torch.ones(1, 4))
    assert donation_report().donors[-1].outcome == "donated"
    del loss


@needs_jax
@in_process(devices=4)
def test_lower_accumulates_over_placeholders_and_runs_nothing() -> None:
    mesh()
    weights = {"rows": placeholder((7, 4), torch.float32), "factors": placeholder((3, 4), torch.float32)}

    def step(weights, tokens):
        model = nn.ParameterDict(weights)

        def loss_of(batch):
            """Its scan has a backward pass."""
            rows = model["rows"][batch[:, :-1]]
            return scan(lambda carry, x: (carry * x, None), rows, model["factors"])[0].sum()

        loss = gradient_accumulation(loss_of, (tokens,), model)
        return loss, {name: weight - weight.grad for name, weight in model.items()}

    lowered = compile(step, donate_argnums=0).lower(weights, placeholder((2, 1, 5), torch.int32))
    module = hlo.parse(lowered.as_text())
    assert "s32[2,1,5]" in [str(shape).partition("{")[0] for shape in module.parameters]
    assert len(module.donors) == 2
