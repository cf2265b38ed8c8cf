"""Trains a model in torch_xla and updates it in JAX: what the jitted update donates, the step may overwrite."""

import functools
from pathlib import Path

import jax
import torch
import torch_xla
import torch_xla.core.xla_builder as xb
from torch_xla import _XLAC

from torch_xla_donate import DonatedBufferError, call_jax, donation_report, user_computation

STEPS = 20


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="rate")
def momentum(params, velocity, gradients, *, rate):
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
    return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity


def loss_of(params):
    return (inputs @ params["weight"] + params["bias"] - targets).pow(2).mean()


def train_step(params, velocity):
    # Autograd's own thread may hold gradients into the step, where they would compete for the donated memory.
    with torch.autograd.set_multithreading_enabled(False):
        gradients, loss = torch.func.grad_and_value(loss_of)(params)
    return loss, *call_jax(momentum, (params, velocity, gradients), {"rate": 0.05})


def places(*trees):
    return [_XLAC._unsafe_buffer_pointer(tree[name]) for tree in trees for name in ("weight", "bias")]


torch.manual_seed(0)
inputs = torch.randn(64, 8).to("xla")
targets = (inputs.cpu() @ torch.arange(16.0).reshape(8, 2) + 3).to("xla")
params = {"weight": torch.zeros(8, 2).to("xla"), "bias": torch.zeros(2).to("xla")}
velocity = {name: torch.zeros_like(value) for name, value in params.items()}
torch_xla.sync(wait=True)

first, kept, losses = places(params, velocity), 0, []
for _ in range(STEPS):
    old = params["weight"]
    loss, params, velocity = train_step(params, velocity)
    torch_xla.sync(wait=True)
    losses.append(loss.item())
    kept += places(params, velocity) == first
print(f"loss {losses[0]:.1f} -> {losses[-1]:.1f}")
print(f"parameters and velocities in their first memory: {kept} of {STEPS} steps")
print(donation_report(steps=1))

try:
    old.sum()
except DonatedBufferError as error:
    print("error:", str(error).replace(__file__, Path(__file__).name).partition(". ")[0])

# The same with an HLO module, from wherever it comes. This one says that its first parameter is aliased to its result.
matrix = jax.ShapeDtypeStruct((8, 2), "float32")
halve = jax.jit(lambda weight, mask: weight * 0.5 * mask, donate_argnums=0).lower(matrix, matrix).compiler_ir("hlo")
computation = xb.computation_from_module_proto("halve", halve.as_serialized_hlo_module_proto())
place = _XLAC._unsafe_buffer_pointer(params["weight"])
mask = torch.ones(8, 2).to("xla")
(halved,) = user_computation("halve", [params["weight"], mask], computation)
torch_xla.sync(wait=True)
print("halved in the same memory:", _XLAC._unsafe_buffer_pointer(halved) == place)
