"""JAX's examples of buffer donation (docs.jax.dev, "Buffer donation"), one by one, with torch_xla_donate."""

import warnings
from pathlib import Path

import torch
import torch_xla

import torch_xla_donate as txd
from torch_xla_donate import DonatedBufferError, DonationWarning, donation_report, is_donated


def ones(*shape):
    array = torch.ones(shape).to("xla")
    torch_xla.sync(wait=True)
    return array


def text(message):
    return str(message).replace(__file__, Path(__file__).name)


def show(message, category, *place):
    print(f"  {category.__name__}: {text(message)}")


warnings.simplefilter("always", DonationWarning)
warnings.showwarning = show  # to the output, where the rest is


def add(x, y):
    return x + y


print("-- the result takes y's memory")
x, y = ones(2, 3), ones(2, 3)
z = txd.compile(add, donate_argnums=(1,))(x, y)
torch_xla.sync(wait=True)
print(f"  x donated: {is_donated(x)}, y donated: {is_donated(y)}")
(donor,) = donation_report(steps=1).donors
print(f"  z in y's memory: {donor.outcome == 'donated' and donor.output == 0}")

print("-- arguments given by keyword are donated, too")


@txd.compile(donate_argnums=(0, 1))
def update(params, state):
    return params * 2, state + 1


params, state = ones(2, 3), ones(3)
new_params, new_state = update(params=params, state=state)
print(f"  params donated: {is_donated(params)}, state donated: {is_donated(state)}")

print("-- of a pytree, every array")


def add_ones(xs):
    return [x + 1 for x in xs]


xs = [ones(2, 3), ones(3, 4)]
z = txd.compile(add_ones, donate_argnums=0)(xs)
print(f"  donated: {[is_donated(x) for x in xs]}")
print(f"  named: {', '.join(donor.name for donor in donation_report(steps=1).donors)}")

print("-- a donated array cannot be used again")
x, y = ones(2, 3), ones(2, 3)
z = txd.compile(add, donate_argnums=(1,))(x, y)
try:
    w = y + 1
except DonatedBufferError as error:
    print(f"  {type(error).__name__}: {text(error)}")

print("-- more donors than outputs")
x, y = ones(2, 3), ones(2, 3)
z = txd.compile(add, donate_argnums=(0, 1))(x, y)
donation_report()  # waits until it is known
print(f"  donated: {is_donated(x) + is_donated(y)} of 2")

print("-- a donor of another shape than the output")
x, y = ones(2, 3), ones(1, 3)
z = txd.compile(add, donate_argnums=(1,))(x, y)
donation_report()
print(f"  y donated: {is_donated(y)}, and still {y.tolist()}")

print("-- a training loop")


@txd.compile(donate_argnames="state")
def update_with_donate(state, delta):
    return {name: value + delta for name, value in state.items()}


state = {"weight": ones(1000, 1000), "bias": ones(1000)}
for _ in range(10):
    state = update_with_donate(state, 0.5)
torch_xla.sync(wait=True)
print(f"  the same memory: {all(donor.outcome == 'donated' for donor in donation_report().donors)}")
print(f"  weight[0, 0]: {state['weight'][0, 0].item()}")
