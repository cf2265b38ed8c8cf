"""Donates on the threads of torch_xla.launch, one for each device: CPU_NUM_DEVICES=4 python -m sanitize.launch."""

from __future__ import annotations

import ranks
import torch_xla

if __name__ == "__main__":
    for function in (ranks.donate_own_buffers, ranks.donate_to_a_compiled_function, ranks.write_rows_in_place):
        torch_xla.launch(function)
