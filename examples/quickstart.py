"""Donates one tensor: the step writes its result into that memory, and a later use is an error."""

from pathlib import Path

import torch
import torch_xla

import torch_xla_donate as txd

weight = torch.ones(1024, 1024, device=torch_xla.device())
torch_xla.sync()  # gives the weight a buffer that can be donated

updated = weight - 0.1 * weight  # recorded; nothing has run yet
txd.donate_buffer(weight)
torch_xla.sync(wait=True)
print(txd.donation_report())

try:
    weight.sum()
except txd.DonatedBufferError as error:
    print("error:", str(error).replace(__file__, Path(__file__).name))
