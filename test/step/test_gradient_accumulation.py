"""gradient_accumulation: what the train step donates, and the order of what it carries."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_xla
from helpers import consume, each_backend, model_of, pointer, whole_copy
from torch_xla.experimental.gradient_accumulation import gradient_accumulation as host_gradient_accumulation
from torch_xla.utils.checkpoint import checkpoint

from torch_xla_donate import (
    DonatedBufferError,
    DonationError,
    DonationWarning,
    cancel_donation,
    compile,
    donate_buffer,
    donation_report,
    gradient_accumulation,
    is_donated,
    scan,
)


def counted(model):
    """A step that adds 1 to the first carried tensor, 2 to the second, and so on."""
    return lambda x, *carried: (model(x).sum(), *[t + k for k, t in enumerate(carried, start=1)])


def test_carried_tensors_come_back_in_their_order(make):
    for count in (1, 2, 3, 5):
        model, data = model_of(), make(3, 2, 4)
        carried = [make(2) + 100 * k for k in range(count)]
        torch_xla.sync()
        _, *result = gradient_accumulation(counted(model), (data,), model, *carried)
        assert [t[0].item() for t in result] == [100 * k + 3 * (k + 1) for k in range(count)]


def test_a_refused_donation_adds_no_gradient(make):
    model, data = model_of(), make(3, 2, 4)
    data = data * 1
    with pytest.raises(DonationError, match="pending"):
        gradient_accumulation(lambda x: model(x).sum(), (data,), model, donate="iterable_tensors")
    assert all(parameter.grad is None for parameter in model.parameters())


def test_donations_in_the_step_donate_carry_and_slices(make):
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


def test_an_iterable_tensor_is_donated_to_an_output_of_its_size(make):
    def step(x, a):
        return model(x).sum() * 0, a * 2 + x.sum()

    model, data, carried = model_of(), make(3, 2, 4), make(3, 2, 4)
    before = pointer(data)
    _, result = gradient_accumulation(step, (data,), model, carried, donate="iterable_tensors")
    torch_xla.sync()
    assert (is_donated(data), is_donated(carried)) == (True, False)
    assert pointer(result) == before
    sums = [28, 92, 156]  # of the slices
    offset = sums[0] * 4 + sums[1] * 2 + sums[2]
    assert result.flatten().tolist() == [8 * k + offset for k in range(24)]
    assert carried.flatten().tolist() == [*range(24)]


def test_donated_carry_returned_unchanged_keeps_its_value(make):
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

    _kept = gradient_accumulation(step, (data,), model, first, second, donate="carried_tensors", strict=False)
    with pytest.raises(DonationError, match=r"iterable_tensors\[0\]: no output of the step has its size") as raised:
        torch_xla.sync(wait=True)
    assert "carried" not in str(raised.value)
    assert (is_donated(first), is_donated(second)) == (True, False)


def test_into_and_non_tensors_are_errors_in_the_step(make):
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

    with pytest.raises(DonationError, match="init is float32.3. on xla:0 and has no buffer yet"):
        run(lambda a: a * 2)
    torch_xla.sync()
    _, final = run(lambda a: a)
    torch_xla.sync()
    assert is_donated(carried) and not is_donated(rows)
    assert final.tolist() == [9, 16, 23]


def test_carried_tensors_that_share_a_buffer_are_refused(make):
    """With each other, with the model, or with a tensor that the step reads. A clone is right."""
    model, carried, data = model_of(), make(2), make(3, 2, 4)
    for other in (carried, carried.detach(), torch.empty_like(carried).copy_(carried)):
        text = r"carried_tensors\[2\] has the same buffer as carried_tensors\[0\], .*clone"
        with pytest.raises(ValueError, match=text):
            gradient_accumulation(counted(model), (data,), model, carried, make(3), other)
        _, one, two = gradient_accumulation(counted(model), (data,), model, carried.clone(), other.clone())
        assert (one.tolist(), two.tolist()) == ([3, 4], [6, 7])
    with pytest.raises(TypeError, match=r"carried_tensors\[1\] is of type int, not a tensor. Pass a tensor"):
        gradient_accumulation(counted(model), (data,), model, carried, 3)
    with pytest.raises(ValueError, match=r"carried_tensors\[0\] has the same buffer as model.bias, but the loop"):
        gradient_accumulation(counted(model), (data,), model, model.bias.detach())
    copy, two = whole_copy(carried), torch.tensor(2.0).to("xla")
    for given in (carried, carried.clone()):
        _, result = gradient_accumulation(counted(model), (data,), model, given)
        assert (result.tolist(), copy.tolist()) == ([3, 4], [0, 1])
    step = lambda x, t: (model(x).sum() * 0 + t, t * torch.tensor(2.0).to("xla"))  # noqa: E731
    loss, result = gradient_accumulation(step, (data,), model, two)
    assert (loss.item(), result.item(), two.item()) == (pytest.approx(14 / 3), 16, 2)
    second = make(2)
    for other in (carried, copy, carried.detach(), carried * 2):
        for step in (
            lambda x, t, u: (model(x).sum() + other.sum(), t + 1, u),  # noqa: B023
            lambda x, t, u: (model(x).sum(), t + 1, other),  # noqa: B023
        ):
            with pytest.raises(
                ValueError, match=r"the train step reads carried_tensors\[0\] itself, or another tensor"
            ):
                gradient_accumulation(step, (data,), model, carried, second)
    with pytest.raises(ValueError, match=r"the train step reads carried_tensors\[0\] itself"):
        gradient_accumulation(lambda x, t: (model(x).sum() + carried.sum(), t.add_(1)), (data,), model, carried)

    def backward_inside(x, t):
        (model(x).sum() * carried.sum()).backward()
        return model(x).sum(), t + 1

    with pytest.raises(ValueError, match=r"the train step reads carried_tensors\[0\] itself"):
        gradient_accumulation(backward_inside, (data,), model, carried)


def test_a_carried_tensor_keeps_its_memory_in_a_later_update(make):
    state, data = make(6), make(3, 2, 4)
    address = pointer(state)
    _, new = gradient_accumulation(lambda x, t: (model_of()(x).sum() * 0, t * 2), (data,), model_of(), state)
    state.copy_(new)
    torch_xla.sync(wait=True)
    assert pointer(state) == address and state.tolist() == [0, 8, 16, 24, 32, 40]


def test_results_that_do_not_fit_are_refused(make):
    model, data, carried = model_of(), make(3, 2, 4), make(2)
    with pytest.raises(ValueError, match=r"returns a loss and \(\), but"):
        gradient_accumulation(lambda x, t: model(x).sum(), (data,), model, carried)
    for rest in ((), (carried * 1, carried * 2), (make(3),), (None,)):
        with pytest.raises(ValueError, match=r"returns a loss and \(.*\), but carried_tensors are \(float32\[2\]\)"):
            gradient_accumulation(lambda x, t: (model(x).sum(), *rest), (data,), model, carried)  # noqa: B023
    outside = torch.nn.Linear(4, 2).to("xla")
    with pytest.raises(
        ValueError, match=r"the train step's loss depends on float32\[2(,4)?\], which is no parameter of"
    ):
        gradient_accumulation(lambda x: (model(x) + outside(x)).sum(), (data,), model)
    leaf = make(4).requires_grad_()
    with pytest.raises(ValueError, match=r"depends on float32\[4\], which is no parameter of model"):
        gradient_accumulation(lambda x: model(x * leaf).sum(), (data,), model)
    for loss in (lambda x: model(x).sum().reshape(1), lambda x: model(x).sum().double()):
        with pytest.raises(TypeError, match="loop adds up float32 scalars"):
            gradient_accumulation(loss, (data,), model)
    with pytest.raises(TypeError, match="loss is of type float, not a tensor"):
        gradient_accumulation(lambda x: 1.0, (data,), model)
    assert all(parameter.grad is None for parameter in (*model.parameters(), *outside.parameters()))


def write_view(x, outside, _):
    outside[:2] += x.detach().sum()


UPDATES = {  # of the step's slice, a tensor from outside and a model
    "slice": (r"a slice of iterable_tensors\[0\]", lambda x, outside, model: x.add_(1)),
    "buffer": (r"model\.1\.num_batches_tracked", lambda x, outside, model: model(x)),
    "parameter": (r"model\.0\.weight", lambda x, outside, model: model[0].weight.data.mul_(2)),
    "tensor": (r"float32\[4\]", lambda x, outside, model: outside.add_(x.detach()[0])),
    "twice": (r"float32\[4\]", lambda x, outside, model: outside.add_(1).add_(1)),
    "view": (r"float32\[4\]", write_view),
    "alias": (r"float32\[4\]", lambda x, outside, model: outside.detach().zero_()),
}


@pytest.mark.parametrize("is_pending", [False, True])
@pytest.mark.parametrize("update", UPDATES)
def test_an_update_of_a_tensor_from_outside_is_refused_and_undone(make, update, is_pending):
    # torch_xla's own loop updates it once, for all iterations.
    name, write = UPDATES[update]
    model, data, outside = torch.nn.Sequential(model_of(), torch.nn.BatchNorm1d(1)).to("xla"), make(3, 2, 4), make(4)
    tensors = [outside, *model.state_dict().values()]
    before = [tensor.cpu() for tensor in tensors]
    if is_pending:
        outside.add_(0)
        model[0].weight.data.add_(0)

    def step(x):
        write(x, outside, model)
        return model[0](x * outside).sum()

    with pytest.raises(ValueError, match=rf"the train step updates {name} in place, which the loop would do only once"):
        gradient_accumulation(step, (data,), model)
    torch_xla.sync()
    assert all(map(torch.equal, before, [tensor.cpu() for tensor in tensors]))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_function_of_torch_compile_runs_as_a_part_of_the_step(make):
    model, data = model_of(), make(3, 2, 4)
    double = torch.compile(lambda t: t.sin() * 2, backend="openxla")
    double(make(2, 1))  # compiled before, as well
    torch_xla.sync()
    gradient_accumulation(lambda x: double(model(x)).sum(), (data,), model)
    found = model.weight.grad.cpu()
    model.zero_grad()
    gradient_accumulation(lambda x: (model(x).sin() * 2).sum(), (data,), model)
    assert torch.equal(found, model.weight.grad.cpu())
    whole = torch.compile(lambda t: t.cos(), backend="openxla", fullgraph=True)
    with pytest.raises(Exception, match="the train step of gradient_accumulation does not compile"):
        gradient_accumulation(lambda x: whole(model(x)).sum(), (data,), model)


def test_a_loss_may_be_carried_and_parameters_may_be_unused(make):
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 2), "unused": torch.nn.Linear(4, 2)}).to("xla")

    def step(x, last):
        loss = model["used"](x).mean() * 0 + 1 + last.sum() * 0
        return loss, loss.detach().reshape(1)

    loss, last = gradient_accumulation(step, (make(3, 2, 4),), model, make(1))
    assert (loss.item(), last.item()) == (1, 1)
    assert [parameter.grad is None for parameter in model.parameters()] == [False, False, True, True]


def test_a_step_may_differentiate_and_update_its_own_tensors(make):
    model = torch.nn.ModuleList([torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)]).to("xla")
    data = make(3, 2, 4)

    def step(x, t):
        model[1](x).sum().backward()  # an auxiliary loss
        point = x.detach().requires_grad_()  # a gradient penalty
        (gradient,) = torch.autograd.grad(model[0](point).sum(), point, create_graph=True)
        t.add_(1)
        return model[0](x).sum() + gradient.pow(2).sum(), t

    _, t = gradient_accumulation(step, (data,), model, make(2))
    found = [parameter.grad.cpu() for parameter in model.parameters()]
    assert t.tolist() == [3, 4]
    plain = copy.deepcopy(model).cpu()
    plain.zero_grad()
    for x in data.cpu():
        plain[1](x).sum().backward()
        point = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(plain[0](point).sum(), point, create_graph=True)
        ((plain[0](x).sum() + gradient.pow(2).sum()) / 3).backward()
    for one, parameter in zip(found, plain.parameters()):
        torch.testing.assert_close(one, parameter.grad)


def test_a_checkpoint_of_activations_hides_no_parameter(make):
    expected, model, data = model_of(), model_of(), make(3, 2, 4)

    def step(x):
        return checkpoint(model, (x * 1).requires_grad_()).pow(2).sum()

    gradient_accumulation(lambda x: expected(x).pow(2).sum(), (data,), expected)
    gradient_accumulation(step, (data,), model)
    torch.testing.assert_close(model.weight.grad.cpu(), expected.weight.grad.cpu())


def test_gradients_are_those_of_torch_xla(make):
    """Existing ones keep their memory."""

    def run(function):
        model = model_of()
        losses = []
        for _ in range(3):
            before = model.weight.grad
            place = None if before is None else pointer(before)
            losses.append(function(lambda x: model(x).pow(2).sum(), (make(3, 2, 4),), model).item())
            torch_xla.sync(wait=True)
            assert place in (None, pointer(model.weight.grad))
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
    not_reading = lambda x, a, b: (model(x).sum(), a + 1, torch.zeros(2, device="xla"))  # noqa: E731
    with pytest.raises(ValueError, match=r"carried_tensors\[1\] is not read by the train step"):
        gradient_accumulation(not_reading, (data,), model, make(2), make(2))
    torch_xla.sync()
    assert model.weight.grad is gradient and gradient.tolist() == before and model.bias.grad is None
    gradient_accumulation(lambda x: model(x).sum(), (data,), model)
    assert model.weight.grad is gradient and gradient.tolist() != before


def test_a_pending_carry_is_computed_first(make):
    """A tensor that the step makes cannot be donated."""
    model = model_of()

    def step(x, a):
        donate_buffer(a * 1)
        return model(x).sum(), a + 1

    with pytest.raises(DonationError, match="has no buffer yet"):
        gradient_accumulation(step, (make(3, 2, 4),), model, make(2))
    torch_xla.sync()
    pending = make(2) + 1
    _kept = gradient_accumulation(counted(model), (make(3, 2, 4),), model, pending, donate="carried_tensors")
    torch_xla.sync()
    assert is_donated(pending)


@each_backend
def test_a_compiled_function_is_a_part_of_the_step(make, options):
    """It does not donate its arguments."""
    model, data, carried = model_of(), make(3, 2, 4), make(5)
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


RUNS = {
    "sync": lambda t: torch_xla.sync(),
    "print": lambda t: repr(t),
    "item": lambda t: t.sum().item(),
    "torch_xla.compile": lambda t: torch_xla.compile(lambda a: a + 1)(t),
}


@pytest.mark.parametrize("read", RUNS)
def test_a_step_that_runs_a_graph_is_refused_and_loses_nothing(make, read):
    # torch_xla's own loop goes on with what came out, as a constant: a wrong loss, and gradients of one iteration.
    model, data, carried, other = model_of(), make(3, 2, 4), make(5), make(4)
    other.add_(5)  # pending, as are the gradients of before
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * 2
    gradient = model.weight.grad

    def step(x, t):
        hidden = model(x)
        RUNS[read](hidden)
        return hidden.sum(), t + 1

    with pytest.raises(DonationError, match=r"the train step has made torch_xla run something \("):
        gradient_accumulation(step, (data,), model, carried, donate="carried_tensors")
    assert other.tolist() == [5, 6, 7, 8]
    assert model.weight.grad is gradient and gradient.tolist() == [[2] * 4]
    assert not is_donated(carried) and not donation_report().pending
    _, result = gradient_accumulation(lambda x, t: (model(x).sum(), t + 1), (data,), model, carried)
    torch_xla.sync()
    assert torch.equal(result.cpu(), carried.cpu() + 3)


def test_a_step_may_read_materialised_tensors(make):
    model, data, seen = model_of(), make(3, 2, 4), []

    def step(x):
        seen.append(x.tolist())
        return model(x).sum()

    gradient_accumulation(step, (data,), model)
    assert seen == [data[0].tolist()]


def test_a_loss_of_another_precision_is_refused(make):
    # torch_xla's own makes a graph that XLA refuses at the sync, with everything that is pending.
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        model, data = model_of().to(dtype), make(3, 2, 4).to(dtype)
        torch_xla.sync()
        other = data * 2
        with pytest.raises(TypeError, match=r"loss is (b?float\d+)\[\], .* Return loss\.float\(\)"):
            gradient_accumulation(lambda x, model=model: model(x).sum(), (data,), model)
        loss = gradient_accumulation(lambda x, model=model: model(x).sum().float(), (data,), model)
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
    kept = consume(weight)
    with pytest.raises(DonatedBufferError):
        gradient_accumulation(lambda x: model(x).sum(), (data,), model)
    assert model.weight.grad is weight and model.bias.grad is bias and bias.item() == 100
    assert torch.equal(kept.cpu(), torch.full((1, 4), 101.0))
