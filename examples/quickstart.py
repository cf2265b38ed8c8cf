"""Donates one tensor: its memory goes to the result of the step, and using it afterwards is an error."""

from pathlib import Path

import torch
import torch_xla
from torch_xla import _XLAC

import torch_xla_donate
from torch_xla_donate import DonatedBufferError, donate_buffer

weight = torch.ones(1024, 1024, device=torch_xla.device())
torch_xla.sync(wait=True)  # the weight gets its memory
place = _XLAC._unsafe_buffer_pointer(weight)

updated = weight - 0.1 * weight  # nothing has run yet
donate_buffer(weight)
torch_xla.sync(wait=True)
print("in the same memory:", _XLAC._unsafe_buffer_pointer(updated) == place)

try:
    weight.sum()
except DonatedBufferError as error:
    print("error:", str(error).replace(__file__, Path(__file__).name))

print(torch_xla_donate.donation_report())
