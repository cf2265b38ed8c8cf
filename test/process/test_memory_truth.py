"""A step's memory with and without donation, as XLA counts it, and the sentences on what donation saves."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch_xla
from children import in_process
from helpers import consume, needs_jax
from sharding import mesh

from torch_xla_donate import compile, hlo, placeholder
from torch_xla_donate._tools.dump import read_text, summarize
from torch_xla_donate._tools.summary import StepSummary
from torch_xla_donate._tools.table import memory_notes

pytestmark = needs_jax
MIB = 1 << 20


def summary_of(folder: Path) -> tuple[StepSummary, Path]:
    """The step with donors in a dump, and the path of its HLO before optimisation."""
    (dumped,) = [module for module in hlo.read_dump(folder) if module.donors]
    return summarize(read_text(dumped.before.path), read_text(dumped.after.path)), dumped.before.path


def square(w):
    return w @ w


def flipped_and_shifted(t):
    return t.flip(0), t + t.sum()


def scaled(w):
    return 0.9 * w


def run_step(function, *shape):
    t = torch.ones(*shape).to("xla")
    torch_xla.sync()
    return consume(t, function, wait=True)


def compared(folder, function, *shape):
    """The summary of a step that donates, with and without its donation."""
    run_step(function, *shape)
    step, before = summary_of(folder)
    module = hlo.compile_for(before, "cpu", undonated=True)
    return dataclasses.replace(step, memory=module.memory, undonated=module.undonated)


@in_process
def test_aliased_yet_a_full_extra_temporary_copy(dump_folder):
    """A product cannot be written over its own operand, so XLA copies the operand into a temporary first."""
    step = compared(dump_folder, square, 512, 512)
    assert (step.memory.alias_bytes, step.memory.temp_bytes) == (MIB, MIB)
    assert (step.undonated.alias_bytes, step.undonated.temp_bytes) == (0, 0)
    assert step.memory.peak_bytes == step.undonated.peak_bytes
    (sentence,) = memory_notes(step)
    assert sentence == (
        "Aliased, yet a full extra temporary copy: outputs reuse 1.0 MiB of donors, but the temporaries grow by 1.0 "
        "MiB. A run takes 2.0 MiB with donation and 2.0 MiB without."
    )


@in_process
def test_a_donor_that_is_copied_saves_memory_but_no_copy(dump_folder):
    step = compared(dump_folder, flipped_and_shifted, 1 << 18)
    assert step.undonated.peak_bytes - step.memory.peak_bytes > 0.9 * MIB
    assert memory_notes(step) == [
        "XLA copies 1.0 MiB of donated arrays at each run (parameter 0), because an operation reads the old value "
        "after XLA begins to write the new one."
    ]


@in_process
def test_a_plain_update_saves_all_that_it_aliases(dump_folder):
    step = compared(dump_folder, scaled, 512, 512)
    assert step.undonated.peak_bytes - step.memory.peak_bytes == step.donated_bytes == MIB
    assert memory_notes(step) == []


@pytest.mark.parametrize("function", [square, flipped_and_shifted])
@in_process
def test_the_bytes_are_those_of_torch_xlas_own_compiler(function):
    """A result of one array has no table of addresses in jax's compiler; torch_xla's table has 8 bytes."""
    lowered = compile(function, donate_argnums=0).lower(placeholder((256, 256), torch.float32))
    own, other = lowered.compile().memory_analysis(), hlo.compile_for(lowered.as_text(), "cpu").memory
    table = 8 if function is not flipped_and_shifted else 0
    for name in ("argument_bytes", "alias_bytes", "temp_bytes"):
        assert getattr(own, name) == getattr(other, name), name
    assert own.output_bytes == other.output_bytes + table


@in_process
def test_on_a_topology_both_are_padded(dump_folder):
    run_step(scaled, 100)
    _, before = summary_of(dump_folder)
    there = hlo.compile_for(before, "v6e:1x1", undonated=True)
    assert there.memory.alias_bytes == 512
    assert there.undonated.alias_bytes == 0
    assert there.undonated.output_bytes == there.memory.output_bytes


@in_process(devices=4)
def test_of_a_sharded_step_the_bytes_are_of_one_device():
    w = placeholder((1024, 64), torch.float32, sharding=(mesh(), ("x", None)))
    module = hlo.compile_for(compile(scaled, donate_argnums=0).lower(w).as_text(), "cpu", undonated=True)
    assert module.num_devices == 4
    assert module.memory.alias_bytes == 1024 * 64 * 4 // 4
    assert module.undonated.alias_bytes == 0


@in_process
def test_compiling_for_cpu_leaves_the_programs_dump_alone(dump_folder):
    import jax

    # jax's compiler dumps in this environment, unless compile_for prevents it.
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    assert os.listdir(dump_folder)
    run_step(scaled, 4)
    _, before = summary_of(dump_folder)
    files = sorted(os.listdir(dump_folder))
    assert hlo.compile_for(before, "cpu").memory.alias_bytes == 16
    assert sorted(os.listdir(dump_folder)) == files
