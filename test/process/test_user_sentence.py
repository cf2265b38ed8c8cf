"""What a user asks for, without any of our tools: mark a tensor, step, and read the dump."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from children import in_process

from torch_xla_donate import donate_buffer


@pytest.mark.filterwarnings("ignore:Use torch_xla.sync")
@in_process
def test_the_dumped_hlo_shows_the_donor_and_its_alias(dump_folder):
    state = torch.arange(6.0).to(torch_xla.device())
    xm.mark_step()
    donate_buffer(state)
    state = state * 2
    xm.mark_step()
    assert state.tolist() == [0, 2, 4, 6, 8, 10]

    def found(files: str, pattern: str) -> list[str]:
        """What the pattern's group is in these files of the dump."""
        texts = [Path(path).read_text(encoding="utf-8") for path in glob.glob(os.path.join(dump_folder, files))]
        return [match[1] for text in texts if (match := re.search(pattern, text))]

    (donor,) = found("*.before_optimizations.txt", r"buffer_donor=\{ \((\d+), \{\}\) \}")
    (parameter,) = found("*after_optimizations.txt", r"input_output_alias=\{ \{0?\}: \((\d+), \{\}, ")
    assert donor == parameter
