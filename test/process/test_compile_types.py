"""The types of compiled functions and modules for mypy and pyright."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch_xla_donate

ROOT = Path(torch_xla_donate.__file__).parent.parent

SOURCE = """
import torch
from typing_extensions import assert_type
from torch_xla_donate import DonationReport, compile, donate_buffer, donation_report


def update(weight: torch.Tensor, lr: float, *, steps: int = 1) -> tuple[torch.Tensor, int]:
    return weight - lr, steps


@compile
def bare(x: torch.Tensor) -> int:
    return 1


@compile(donate_argnums=0, pure=True)
def decorated(x: torch.Tensor) -> list[torch.Tensor]:
    return [x]


class Trainer:
    @compile(donate_argnums=1)
    def step(self, x: torch.Tensor, lr: float) -> torch.Tensor:
        return x * lr


w = torch.ones(3)
called = compile(update, donate_argnums=0)
assert_type(called(w, 0.1), tuple[torch.Tensor, int])
assert_type(called(w, lr=0.1, steps=2), tuple[torch.Tensor, int])
assert_type(bare(w), int)
assert_type(decorated(w), list[torch.Tensor])
assert_type(Trainer().step(w, 0.1), torch.Tensor)
assert_type(called.__name__, str)
assert_type(called.lower(w, 0.1).as_text(), str)
assert_type(called.lower(w, 0.1).compile().memory_analysis().peak_bytes, int)
assert_type(called.__wrapped__(w, 0.1), tuple[torch.Tensor, int])

module = compile(torch.nn.Linear(3, 3), donate_argnums=0)
as_module: torch.nn.Module = module
module.weight.shape
module.eval().train()
module.lower(w)
wrapped = compile(donate_argnums=0)(torch.nn.Linear(3, 3))
wrapped.state_dict()
with donate_buffer(w):
    pass
assert_type(donation_report(), DonationReport)

called("w", 0.1)  # error
called(w)  # error
called(w, 0.1, step=2)  # error
called.lower(w)  # error
called.weight  # error
bare()  # error
decorated(1)  # error
Trainer().step(w)  # error
compile(3)  # error
compile(update, donate_argnums=0.5)  # error
compile(update, backend="cuda")  # error
compile(update, pure="yes")  # error
"""


def expected() -> set[int]:
    return {number for number, line in enumerate(SOURCE.splitlines(), 1) if line.endswith("# error")}


def lines_with_errors(command: list[str], folder: Path) -> tuple[set[int], str]:
    source = folder / "program.py"
    source.write_text(SOURCE, encoding="utf-8")
    paths = {"MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    done = subprocess.run(
        [*command, str(source)], capture_output=True, text=True, cwd=folder, env={**os.environ, **paths}, timeout=600
    )
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    return {int(line) for line in re.findall(r"program\.py:(\d+)(?::\d+)?(?:-\d+)?(?: -|:) error", output)}, output


def test_mypy_knows_what_is_compiled(tmp_path):
    # The options and the cache of `make lint`, which has read torch.
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    found, output = lines_with_errors([sys.executable, "-m", "mypy", *settings], tmp_path)
    assert found == expected(), output


def test_pyright_knows_what_is_compiled(tmp_path):
    settings = {"pythonVersion": "3.11", "extraPaths": [str(ROOT)], "reportUnusedExpression": "none"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    # pyright takes the first `python` on PATH, not the one that started it.
    found, output = lines_with_errors([sys.executable, "-m", "pyright", "--pythonpath", sys.executable], tmp_path)
    assert found == expected(), output
