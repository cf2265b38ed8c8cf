"""Donates on the threads of torch_xla.launch, one for each device: CPU_NUM_DEVICES=4 python -m sanitize.launch."""

from __future__ import annotations

import ranks
import torch_xla
from helpers import loops_with_and_without_donation

if __name__ == "__main__":
    for function in (ranks.donate_own_buffers, ranks.donate_to_a_compiled_function, loops_with_and_without_donation):
        torch_xla.launch(function)
