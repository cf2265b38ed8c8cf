"""Llama's training step for TPUs that are not there: every donor is aliased, and the formula knows the bytes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch_xla
from children import in_process
from helpers import lacking, needs_jax

from torch_xla_donate import auto_donate, donation_report, hlo

spmd_scan = lacking("2.8", "XLA refuses the backward pass of a scan under SPMD, as its shard_alike has no sharding")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        del sys.path[0]


def check_row(devices: int, topology: str) -> None:
    model = example("_memory_model")
    size, row = model.SIZES["tiny"], example("llama").measure("tiny", None, devices, topology, "by-hand")
    assert row["aliased"] == row["donors"] == 3 * len(size.shapes()) + 1
    assert row["memory"]["alias_bytes"] == model.state(size, devices)
    assert row["memory"]["argument_bytes"] == model.arguments(size, devices)
    assert row["memory"]["output_bytes"] == model.outputs(size, devices, topology[:3])


@needs_jax
@in_process()
def test_the_formula_is_exact_on_one_device() -> None:
    check_row(1, "v6e:1x1")


@spmd_scan
@needs_jax
@in_process(devices=4)
def test_the_formula_is_exact_and_all_is_aliased_on_four_devices() -> None:
    check_row(4, "v5e:2x2")


@needs_jax
@spmd_scan
@in_process(devices=4)
def test_auto_donate_donates_what_lower_does_by_hand(dump_folder: Path) -> None:
    """The step of a real loop, whose batch stays."""
    model, llama = example("_memory_model"), example("llama")
    size = model.SIZES["tiny"]
    lowered = hlo.parse(llama.lower(size, 4, "auto").as_text())
    mark = llama.marker(llama.mesh_of(4))
    step, _ = llama.steps_of(size, mark)

    def arrays(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {name: mark(name, torch.ones(shape).to(dtype).to("xla")) for name, shape in size.shapes().items()}

    state = {"params": arrays(torch.bfloat16), "m": arrays(torch.float32), "v": arrays(torch.float32)}
    state["step"] = torch.zeros(()).to("xla")
    batches = torch.zeros(2, 1, size.sequence + 1, dtype=torch.int32).to("xla")
    torch_xla.sync(wait=True)
    with auto_donate():
        for _ in range(2):
            state, _ = step(state, batches)
            torch_xla.sync(wait=True)
    assert donation_report(steps=1).reused_fraction == 1
    run = max(
        (module.before for module in hlo.read_dump(dump_folder) if module.before), key=lambda one: len(one.donors)
    )

    def donated(module: hlo.HloModule) -> list[str]:
        shapes = [module.parameters[donor.parameter_number] for donor in module.donors]
        return sorted(str(shape).partition("{")[0] for shape in shapes)

    assert donated(run) == donated(lowered)
    assert len(run.donors) == 3 * len(size.shapes()) + 1
