"""gradient_accumulation: what the train step donates, and the order of what it carries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xr
from children import in_process
from helpers import pointer
from torch import nn
from torch_xla.experimental.gradient_accumulation import gradient_accumulation as host_gradient_accumulation

from torch_xla_donate import (
    DonatedBufferError,
    DonationError,
    DonationWarning,
    cancel_donation,
    compile,
    donate_buffer,
    donation_report,
    gradient_accumulation,
    hlo,
    is_donated,
    placeholder,
    scan,
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


def test_the_step_donates_its_carry_and_its_slices(make):
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


def test_an_iterable_tensor_is_donated_to_an_output_of_its_size(make):
    def step(x, a):
        return model(x).sum() * 0, a * 2 + x.sum()

    model, data, carried = model_of(), make(3, 2, 4), make(3, 2, 4)
    torch_xla.sync()
    before = pointer(data)
    _, result = gradient_accumulation(step, (data,), model, carried, donate="iterable_tensors")
    torch_xla.sync()
    assert (is_donated(data), is_donated(carried)) == (True, False)
    assert pointer(result) == before
    sums = [28, 92, 156]  # of the slices
    offset = sums[0] * 4 + sums[1] * 2 + sums[2]
    assert result.flatten().tolist() == [8 * k + offset for k in range(24)]
    assert carried.flatten().tolist() == [*range(24)]


def test_a_donated_carry_that_comes_out_as_it_was_is_right(make):
    model, carried, other = model_of(), make(5), make(6)
    step = lambda x, a, b: (model(x).sum() + a.sum() * 0, a, b + 1)  # noqa: E731
    _, result, more = gradient_accumulation(step, (make(3, 2, 4),), model, carried, other, donate="carried_tensors")
    torch_xla.sync()
    assert is_donated(carried) and is_donated(other)
    assert (result.tolist(), more.tolist()) == ([0, 1, 2, 3, 4], [3, 4, 5, 6, 7, 8])


def test_a_donation_in_the_step_is_as_strict_as_it_says(make):
    """A donation that the step cancels is not made."""
    model, data, first, second = model_of(), make(3, 2, 4), make(2), make(7)

    def step(x, a, b):
        donate_buffer(x, strict=True)
        cancel_donation(b)
        return model(x).sum(), a + 1, b + 1

    kept = gradient_accumulation(step, (data,), model, first, second, donate="carried_tensors", strict=False)
    with pytest.raises(DonationError, match=r"iterable_tensors\[0\]: no output of the step has its size") as raised:
        torch_xla.sync(wait=True)
    assert "carried" not in str(raised.value)
    assert (is_donated(first), is_donated(second)) == (True, False)
    del kept


def test_into_and_what_is_no_tensor_are_errors_in_the_step(make):
    def run(*given, **options):
        def step(x, a):
            donate_buffer([a, *given], **options)
            return model(x).sum(), a + 1

        model, carried = model_of(), make(2)
        try:
            gradient_accumulation(step, (make(3, 2, 4),), model, carried)
        finally:
            assert not donation_report().pending

    with pytest.raises(TypeError, match=r"tensors\[1\] is of type str"):
        run("text")
    with pytest.raises(ValueError, match=r"into is given for tensors\[0\], which stands for an argument of grad"):
        run(into=[torch.ones(7)])
    torch_xla.sync()
    for wrong, error in (("model", ValueError), (True, TypeError)):
        with pytest.raises(error, match=f'donate is {wrong!r}. Pass "iterable_tensors", "carried_tensors" or both'):
            gradient_accumulation(lambda x: x.sum(), (make(3, 2),), model_of(), donate=wrong)


def test_a_scan_in_the_step_donates_the_carry_of_the_step(make):
    """The error for another tensor names it and gives the reason."""
    model, data, carried, rows = model_of(), make(3, 2, 4), make(3), make(2, 3)

    def run(first):
        def step(x, a):
            final, _ = scan(lambda carry, row: (carry + row, carry), first(a), rows, donate="init")
            return model(x).sum(), final

        return gradient_accumulation(step, (data,), model, carried)

    with pytest.raises(DonationError, match="init is float32.3. on xla:0, not materialised"):
        run(lambda a: a * 2)
    torch_xla.sync()
    _, final = run(lambda a: a)
    torch_xla.sync()
    assert is_donated(carried) and not is_donated(rows)
    assert final.tolist() == [9, 16, 23]


@pytest.mark.parametrize("alias", ["itself", "detached", "whole copy"])
def test_a_tensor_that_is_carried_twice_is_refused(make, alias):
    model, carried = model_of(), make(2)
    other = {"itself": carried, "detached": carried.detach(), "whole copy": torch.empty_like(carried).copy_(carried)}
    data = make(3, 2, 4)
    with pytest.raises(ValueError, match=r"carried_tensors\[2\] has the same buffer as carried_tensors\[0\], .*clone"):
        gradient_accumulation(counted(model), (data,), model, carried, make(3), other[alias])
    _, one, two = gradient_accumulation(counted(model), (data,), model, carried.clone(), other[alias].clone())
    assert (one.tolist(), two.tolist()) == ([3, 4], [6, 7])
    with pytest.raises(TypeError, match=r"carried_tensors\[1\] is of type int, not a tensor. Pass a tensor"):
        gradient_accumulation(counted(model), (data,), model, carried, 3)


def test_a_carry_whose_buffer_another_tensor_holds_is_refused(make):
    """A clone is right."""
    model, carried, data = model_of(), make(2), make(3, 2, 4)
    copy = torch.empty_like(carried).copy_(carried)
    torch_xla.sync()
    with pytest.raises(ValueError, match=r"carried_tensors\[0\] shares its buffer with another tensor"):
        gradient_accumulation(counted(model), (data,), model, carried)
    _, result = gradient_accumulation(counted(model), (data,), model, carried.clone())
    assert (result.tolist(), copy.tolist()) == ([3, 4], [0, 1])


@in_process(devices=4)
def test_under_spmd_the_carry_is_donated_and_aliased_per_device(dump_folder):
    xr.use_spmd()
    mesh = spmd.Mesh(np.arange(4), (4,), ("x",))

    def run(function, **options):
        model = model_of()
        data, carried = torch.arange(96.0).reshape(3, 8, 4).to("xla"), torch.arange(32.0).reshape(8, 4).to("xla")
        spmd.mark_sharding(data, mesh, (None, "x", None))
        spmd.mark_sharding(carried, mesh, ("x", None))
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


def test_gradients_are_those_of_torch_xla(make):
    """Existing ones keep their memory."""

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


def test_a_call_that_fails_leaves_the_gradients_as_they_were(make):
    model, data = model_of(), make(3, 2, 4)
    model.bias.requires_grad_(False)
    model(data[0]).sum().backward()
    torch_xla.sync()
    gradient, before = model.weight.grad, model.weight.grad.tolist()

    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradient_accumulation(broken, (data,), model)
    # torch_xla finds this out when it has made the loop.
    with pytest.raises(ValueError, match="is not read by the train step"):
        gradient_accumulation(lambda x, a: (model(x).sum(), torch.zeros(2, device="xla")), (data,), model, make(2))
    torch_xla.sync()
    assert model.weight.grad is gradient and gradient.tolist() == before and model.bias.grad is None
    gradient_accumulation(lambda x: model(x).sum(), (data,), model)
    assert model.weight.grad is gradient and gradient.tolist() != before


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


def test_a_pending_carry_is_computed_first(make):
    """A tensor that the step makes cannot be donated."""
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
    assert {donor.name.partition("]")[0] for donor in donors} == {
        "['gradients'",
        "['parameters'",
        "['exp_avg'",
        "['exp_avg_sq'",
    }
    assert losses == plain_losses == sorted(plain_losses, reverse=True)
    assert all(map(torch.equal, values, plain))


@pytest.mark.parametrize("options", [{}, {"pure": True}, {"backend": "openxla"}], ids=["lazy", "pure", "openxla"])
def test_a_compiled_function_is_a_part_of_the_step(make, options):
    """It does not donate its arguments."""
    model, data, carried = model_of(), make(3, 2, 4), make(5)
    torch_xla.sync()
    loss, _ = gradient_accumulation(lambda x, t: (model(x).pow(2).mean(), t + 1), (data,), model, carried)
    gradient, expected = model.weight.grad.tolist(), loss.item()
    model.zero_grad()
    bump = compile(lambda t: t + 1, donate_argnums=0, **options)
    step = compile(lambda x, t: (model(x).pow(2).mean(), bump(t)), donate_argnums=(0, 1), **options)
    loss, result = gradient_accumulation(step, (data,), model, carried)
    torch_xla.sync()
    assert (loss.item(), model.weight.grad.tolist()) == (expected, gradient)
    assert torch.equal(result.cpu(), carried.cpu() + 3)
    assert not is_donated(data) and not donation_report(steps=1).pending


@pytest.mark.parametrize(
    "read",
    [
        lambda t: torch_xla.sync(),
        lambda t: repr(t),
        lambda t: t.sum().item(),
        lambda t: torch.compile(lambda a: a + 1, backend="openxla")(t),
        lambda t: torch_xla.compile(lambda a: a + 1)(t),
    ],
    ids=["sync", "print", "item", "openxla", "torch_xla.compile"],
)
def test_a_step_that_runs_a_graph_is_refused_and_loses_nothing(make, read):
    # torch_xla's own loop goes on with what came out, as a constant: a wrong loss, and gradients of one iteration.
    model, data, carried, other = model_of(), make(3, 2, 4), make(5), make(4)
    torch_xla.sync()
    other.add_(5)  # pending, as are the gradients of before
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 2
    gradient = model.weight.grad

    def step(x, t):
        hidden = model(x)
        read(hidden)
        return hidden.sum(), t + 1

    with pytest.raises(DonationError, match=r"the train step has made torch_xla run something \("):
        gradient_accumulation(step, (data,), model, carried, donate="carried_tensors")
    assert other.tolist() == [5, 6, 7, 8]
    assert model.weight.grad is gradient and gradient.tolist() == [[2] * 4]
    assert not is_donated(carried) and not donation_report().pending
    _, result = gradient_accumulation(lambda x, t: (model(x).sum(), t + 1), (data,), model, carried)
    torch_xla.sync()
    assert torch.equal(result.cpu(), carried.cpu() + 3)


def test_a_step_may_read_what_is_there(make):
    model, data, seen = model_of(), make(3, 2, 4), []
    torch_xla.sync()

    def step(x):
        seen.append(x.tolist())
        return model(x).sum()

    gradient_accumulation(step, (data,), model)
    assert seen == [data[0].tolist()]


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_loss_of_another_precision_is_refused(make, dtype):
    # torch_xla's own makes a graph that XLA refuses at the sync, with everything that is pending.
    model, data = model_of().to(dtype), make(3, 2, 4).to(dtype)
    torch_xla.sync()
    other = data * 2
    with pytest.raises(TypeError, match=r"loss is (b?float\d+)\[\], .* Return loss\.float\(\)"):
        gradient_accumulation(lambda x: model(x).sum(), (data,), model)
    loss = gradient_accumulation(lambda x: model(x).sum().float(), (data,), model)
    torch_xla.sync()
    assert loss.item() == pytest.approx((model(data).sum() / 3).item(), rel=1e-2)
    assert model.weight.grad.dtype == dtype and torch.equal(other.cpu(), data.cpu() * 2)


def test_an_unusable_gradient_leaves_the_other_gradients(make):
    """A gradient that was donated cannot be added to."""
    model, data = model_of(), make(3, 2, 4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 100
    torch_xla.sync()
    weight, bias = model.weight.grad, model.bias.grad
    donate_buffer(weight)
    kept = weight + 1
    torch_xla.sync()
    assert is_donated(weight)
    with pytest.raises(DonatedBufferError):
        gradient_accumulation(lambda x: model(x).sum(), (data,), model)
    assert model.weight.grad is weight and model.bias.grad is bias and bias.item() == 100
    assert torch.equal(kept.cpu(), torch.full((1, 4), 101.0))


def looked_up(model, tokens):
    """A loss whose scan has a backward pass."""
    rows = model["rows"][tokens[:, :-1]]
    return scan(lambda carry, x: (carry * x, None), rows, model["factors"])[0].sum()


@in_process(devices=4)
def test_each_iteration_of_spmd_gets_its_slice_with_a_scan() -> None:
    """torch_xla 2.9.0 gives the first slice to every iteration."""
    xr.use_spmd()
    model = nn.ParameterDict({"rows": torch.arange(28.0).reshape(7, 4), "factors": torch.full((3, 4), 2.0)}).to("xla")
    tokens = torch.tensor([[[0, 1, 2, 3, 4]], [[2, 3, 4, 5, 6]]]).to("xla")
    torch_xla.sync(wait=True)
    loss = gradient_accumulation(lambda batch: looked_up(model, batch), (tokens,), model)
    torch_xla.sync(wait=True)
    rows = torch.arange(28.0).reshape(7, 4)
    assert loss.item() == 8 * (rows[:4].sum() + rows[2:6].sum()).item() / 2
    assert model["rows"].grad[:, 0].tolist() == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0, 0.0]


@in_process(devices=4)
def test_lower_accumulates_over_placeholders_and_runs_nothing() -> None:
    xr.use_spmd()
    weights = {"rows": placeholder((7, 4), torch.float32), "factors": placeholder((3, 4), torch.float32)}

    def step(weights, tokens):
        model = nn.ParameterDict(weights)
        loss = gradient_accumulation(lambda batch: looked_up(model, batch), (tokens,), model)
        return loss, {name: weight - weight.grad for name, weight in model.items()}

    lowered = compile(step, donate_argnums=0).lower(weights, placeholder((2, 1, 5), torch.int32))
    module = hlo.parse(lowered.as_text())
    assert "s32[2,1,5]" in [str(shape).partition("{")[0] for shape in module.parameters]
    assert len(module.donors) == 2
