"""lower() and compile()."""

from __future__ import annotations

import pytest
import torch
import torch_xla
from helpers import Couple, compiles, consume, error_of
from torch_xla.core import xla_builder

import torch_xla_donate
from torch_xla_donate import DonationError, compile, hlo


def sgd(state, gradients):
    return {name: value - 0.1 * gradients[name] for name, value in state.items()}


@pytest.mark.parametrize("pure", [False, True])
def test_lowering_shows_donors_and_compiling_shows_aliases(make, pure):
    step = compile(sgd, donate_argnums=0, pure=pure)
    state, gradients = {"w": make(4, 4), "b": make(4)}, {"w": make(4, 4), "b": make(4)}
    lowered = step.lower(state, gradients)
    before = hlo.parse(lowered.as_text())
    assert len(before.donors) == 2 and not before.aliases
    executable = lowered.compile()
    after = hlo.parse(executable.as_text())
    assert len(after.aliases) == 2
    memory = executable.memory_analysis()
    assert memory.alias_bytes == 4 * (16 + 4)
    assert memory.argument_bytes >= 2 * memory.alias_bytes
    assert memory.peak_bytes == (memory.argument_bytes + memory.output_bytes + memory.temp_bytes - memory.alias_bytes)
    # Nothing was consumed, and nothing has run.
    assert state["w"].tolist() == make(4, 4).tolist() and not torch_xla_donate.is_donated(state["w"])


def test_the_arguments_info_tells_what_is_donated(make):
    step = compile(lambda x, scale, *, y: (x + y) * scale, donate_argnames=("x", "y"), static_argnames="scale")
    lowered = step.lower(make(3), 2, y=make(3))
    (x, scale), named = lowered.args_info
    assert (x.shape, x.dtype, x.donated) == ((3,), torch.float32, True)
    assert scale == 2
    assert named["y"].donated and str(named["y"]) == "float32[3]"


def test_arrays_without_memory_are_sized():
    weights, gradients = (xla_builder.create_placeholder_tensor((250_000, 100_000), torch.float32) for _ in range(2))
    plain = compile(lambda w, g: w - 0.1 * g).lower(weights, gradients).compile().memory_analysis()
    donated = compile(lambda w, g: w - 0.1 * g, donate_argnums=0).lower(weights, gradients).compile().memory_analysis()
    size = 4 * 250_000 * 100_000
    assert (plain.alias_bytes, donated.alias_bytes) == (0, size)
    assert plain.peak_bytes - donated.peak_bytes == size


def test_a_function_that_computes_nothing_has_no_memory_to_report(make):
    x = make(3)
    executable = compile(lambda x: x).lower(x).compile()
    with pytest.raises(RuntimeError, match="<lambda> computes nothing on the device"):
        executable.memory_analysis()
    assert executable(x) is x


def test_a_step_that_updates_in_place_is_left_as_it_was(make):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    x = make(4, 8)

    def train(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = compile(train)
    fresh = step.lower(model, optimizer, x)  # the optimizer has no state yet
    assert not optimizer.state and model.weight.grad is None
    step(model, optimizer, x)
    before = [tensor.clone() for tensor in (model.weight, *optimizer.state[model.weight].values())]
    torch_xla.sync(wait=True)
    lowered = step.lower(model, optimizer, x)
    assert lowered.compile().memory_analysis().alias_bytes == 3 * 4 * (64 + 8)
    assert len(hlo.parse(lowered.as_text()).donors) == 6 > len(hlo.parse(fresh.as_text()).donors)
    after = [model.weight, *optimizer.state[model.weight].values()]
    assert all(torch.equal(left.cpu(), right.cpu()) for left, right in zip(before, after))
    step(model, optimizer, x)
    assert not torch.equal(model.weight.cpu(), before[0].cpu())


def test_a_compiled_object_compiles_once_runs_and_refuses_other_arguments(make):
    step = compile(sgd, donate_argnums=0, pure=True)
    state, gradients = {"w": make(7)}, {"w": make(7)}
    compiled = compiles()
    executable = step.lower(state, gradients).compile()
    assert compiles() == compiled + 1
    after = executable(executable(state, gradients), gradients)
    assert compiles() == compiled + 1
    assert torch.allclose(after["w"].cpu(), torch.arange(7.0) * 0.8)
    assert torch_xla_donate.is_donated(state["w"])
    message = error_of(TypeError, executable, {"w": make(5)}, {"w": make(7).to(torch.bfloat16)})
    assert "sgd was compiled for other types of arguments: argument 0['w']: compiled for float32[7], " in message
    assert "called with float32[5]; argument 1['w']: compiled for float32[7], called with bfloat16[7]" in message
    with pytest.raises(TypeError, match="was compiled for arguments of the structure"):
        executable({"v": make(7)}, {"w": make(7)})


def test_a_pytree_class_that_takes_only_tensors_is_lowered(make):
    """It is also called, and refused by its leaves."""
    step = compile(lambda w, *, k: w.first + w.second * k, donate_argnums=0)
    lowered = step.lower(Couple(make(4), make(4)), k=2)
    assert len(hlo.parse(lowered.as_text()).donors) == 2
    with pytest.raises(TypeError, match="a Couple takes tensors"):
        print(lowered.args_info)
    executable = lowered.compile()
    with pytest.warns(torch_xla_donate.DonationWarning, match=r"w\[1\] \(argument 0 of <lambda>\)"):
        assert executable(Couple(make(4), make(4)), k=2).tolist() == [0, 3, 6, 9]
        torch_xla_donate.donation_report()
    with pytest.raises(
        TypeError, match=r"argument 0\[1\]: compiled for float32\[4\], called with float32\[5\]; argument 'k': c"
    ):
        executable(Couple(make(4), make(5)), k=3)


RUNS = "makes torch_xla run something, as a read on the host or an operation that XLA lacks does"
HOST_OPERATIONS = [
    (lambda x: x * x.sum().item(), r"reads float32\[\] on the host"),
    (lambda x: x[x > 0].sum(), RUNS),
    (lambda x: x if torch.equal(x, x) else -x, RUNS),
    (lambda x: x[x.bool()].sum(), RUNS),
    (torch.lgamma, RUNS),
    (lambda x: torch.lgamma(x * 2), RUNS),
]


def test_an_operation_on_the_host_cannot_be_lowered(make):
    """Nothing is left behind."""
    for operation, what in HOST_OPERATIONS:
        x = make(4)

        def f(x, operation=operation):
            return operation(x)

        with pytest.raises(DonationError, match=rf"f cannot be lowered, because at .*test_ahead.py:\d+ it {what}"):
            compile(f, static_argnums=1).lower(x)
        assert torch_xla._XLAC._get_allow_execution()
        assert consume(x, wait=True).tolist() == [1, 2, 3, 4]


def test_arguments_on_another_device_are_not_lowered():
    for device in ("cpu", "meta"):
        text = rf"cannot be lowered for float32\[3\] on {device}, .*placeholder_like\(\) of the arguments"
        with pytest.raises(ValueError, match=text):
            compile(lambda x: x + 1).lower(torch.ones(3, device=device))


def test_lowering_leaves_closed_over_gradients_and_views_as_they_were(make):
    model, cache, x = torch.nn.Linear(3, 1).to("xla"), make(2, 3), make(2, 3)
    row = cache[0]
    torch_xla.sync()

    def train(x):
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    def write(x):
        row.add_(x[1])
        return row * 2

    compile(train)(x)
    before = model.weight.grad.tolist()
    compile(train).lower(x).compile()
    assert model.weight.grad.tolist() == before
    compile(write).lower(x)
    assert cache.tolist() == [[0, 1, 2], [3, 4, 5]] and row.tolist() == [0, 1, 2]
    assert compile(write)(x).tolist() == [6, 10, 14]
    assert cache.tolist() == [[3, 5, 7], [3, 4, 5]]


def test_what_a_lowered_function_keeps_raises_when_a_step_reads_it(make):
    """Such as the state that an optimizer makes in its first step."""
    kept = {}

    def step(x):
        kept["mean"] = kept.get("mean", 0) * 0.5 + x
        return kept["mean"] * 2

    f = compile(step)
    f.lower(make(3))
    with pytest.raises(RuntimeError, match="A placeholder has no value"):
        f(make(3))
    kept.clear()
    assert f(make(3)).tolist() == [0, 2, 4]
