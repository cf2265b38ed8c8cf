"""Llama's training step for TPUs that are not there: every donor is aliased, and the formula knows the bytes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch_xla
from children import in_process
from helpers import import_from, needs_jax, spmd_scan_gradients

from torch_xla_donate import auto_donate, donation_report, hlo

pytestmark = needs_jax


@spmd_scan_gradients
@in_process(devices=4)
def test_the_formula_is_exact_and_all_is_aliased_on_four_devices() -> None:
    model, llama = import_from("examples", "_memory_model"), import_from("examples", "llama")
    size, row = model.SIZES["tiny"], llama.measure("tiny", None, 4, "v5e:2x2", "by-hand")
    assert row["aliased"] == row["donors"] == 3 * len(size.shapes()) + 1
    assert row["memory"]["alias_bytes"] == model.state(size, 4)
    assert row["memory"]["argument_bytes"] == model.arguments(size, 4)
    assert row["memory"]["output_bytes"] == model.outputs(size, 4, "v5e")


@spmd_scan_gradients
@in_process(devices=4)
def test_auto_donate_donates_what_lower_does_by_hand(dump_folder: Path) -> None:
    """The step of a real loop, whose batch stays."""
    model, llama = import_from("examples", "_memory_model"), import_from("examples", "llama")
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
