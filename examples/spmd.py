"""A sharded training step with donation, on four virtual CPU devices: the bytes on each device decide.

The weights are sharded by their rows. The momenta come from `zeros` without a sharding, so each device holds them
as a whole. The first step makes sharded momenta, which have other sizes and cannot take the old buffers over. From the
second step on everything is donated.
"""

import os

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="4", XLA_FLAGS="--xla_force_host_platform_device_count=4")

import warnings

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from torch_xla_donate import DonationWarning, donate_buffer, donation_report

xr.use_spmd()
mesh = xs.Mesh(np.arange(4), (4,), ("rows",))


def sharded(array: torch.Tensor) -> torch.Tensor:
    xs.mark_sharding(array, mesh, ("rows", None))
    return array


def step(state: dict[str, torch.Tensor], batch: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = state["weights"].detach().requires_grad_()
    (gradient,) = torch.autograd.grad((batch @ weights).square().mean(), [weights])
    momenta = sharded(0.9 * state["momenta"] + gradient)
    return {"weights": sharded(state["weights"] - 0.1 * momenta), "momenta": momenta}


torch.autograd.set_multithreading_enabled(False)  # its threads may hold gradients into the step, which would be outputs
torch.manual_seed(0)
state = {
    "weights": sharded(torch.randn(512, 256).to("xla")),
    "momenta": torch.zeros(512, 256).to("xla"),  # sharded(...) is missing here
}
batch = torch.randn(64, 512).to("xla")
torch_xla.sync(wait=True)

warnings.simplefilter("ignore", DonationWarning)  # the report says the same
for number in (1, 2):
    old, state = state, step(state, batch)
    donate_buffer(old)
    torch_xla.sync(wait=True)
    for donor in sorted(donation_report(steps=1).donors, key=lambda donor: donor.name):
        held = f"{donor.bytes_per_device // 1024} of {donor.bytes // 1024} KiB on each device"
        print(f"step {number}: {donor.name} {donor.sharding}: {held}, {donor.outcome}")

print(donation_report())
