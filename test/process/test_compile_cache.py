"""The persistent compilation cache: donating and plain runs of a graph are two entries, each with its own aliasing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from children import run_in_child
from helpers import BACKENDS, compiles, make, needs_jax, pointer

import torch_xla_donate
from torch_xla_donate import donate_buffer, is_donated


class Runs(NamedTuple):
    new: list[tuple[str, list[str]]]  #: of each run, donating (d) or plain (p): the entries that it made
    counters: dict[str, int]
    compiled: int


def run(folder: Path, kind: str, order: str, *, readonly: bool = False) -> Runs:
    """Runs the same function in a child, donating (d) or not (p), in the order given."""
    return run_in_child(run_all, folder, kind, order, readonly).value


def run_all(folder: Path, kind: str, order: str, readonly: bool) -> Runs:
    xr.initialize_cache(str(folder), readonly=readonly)
    new = [(step, run_once(folder, kind, donate=step == "d")) for step in order]
    counters = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("Persistent")}
    return Runs(new, counters, compiles())


def run_once(folder: Path, kind: str, *, donate: bool) -> list[str]:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    t = make(8)
    first, files = pointer(t), set(os.listdir(folder))
    if kind == "step":
        if donate:
            donate_buffer(t)
        out = f(t)
        torch_xla.sync(wait=True)
    else:
        out = torch_xla_donate.compile(f, donate_argnums=0 if donate else None, **BACKENDS[kind])(t)
    assert out.tolist() == [2 * i + 1 for i in range(8)]
    assert is_donated(t) == donate == (pointer(out) == first)
    if not donate:
        assert t.tolist() == list(range(8))
    return sorted(set(os.listdir(folder)) - files)


def read_aliases(folder: Path) -> dict[str, bool]:
    """Whether each entry has aliases, as XLA reads them back. torch_xla's client for CPU cannot; jaxlib's can."""
    import jax
    from jax._src.lib import xla_client

    jax.config.update("jax_platforms", "cpu")
    device = jax.devices("cpu")
    devices = xla_client.DeviceList(tuple(device))
    found = {}
    for path in folder.iterdir():
        executable = device[0].client.deserialize_executable(path.read_bytes(), devices, None)
        (module,) = executable.hlo_modules()
        found[path.name] = "input_output_alias" in module.to_string().splitlines()[0]
    return found


@pytest.mark.parametrize("kind", [pytest.param("step", marks=needs_jax), "pure", "openxla"])
def test_a_donating_and_a_plain_run_never_share_an_entry(tmp_path, kind):
    # WHEN one process donates first, and another one last, each with a separate cache
    for name in ("first", "last"):
        (tmp_path / name).mkdir()
    first = run(tmp_path / "first", kind, "dp")
    last = run(tmp_path / "last", kind, "pd")
    # THEN each run has made an entry, the same ones in both orders
    (_, (donating,)), (_, (plain,)) = first.new
    assert last.new == [("p", [plain]), ("d", [donating])]
    assert donating != plain
    # AND only the donating one has an alias in its executable
    if kind == "step":
        aliases = [run_in_child(read_aliases, tmp_path / name).value for name in ("first", "last")]
        assert aliases == [{donating: True, plain: False}] * 2


@pytest.mark.parametrize(("before", "after"), [("dp", "pd"), ("d", "p"), ("p", "d"), ("dp", "dp")])
def test_a_process_that_finds_the_cache_donates_as_its_marks_say(tmp_path, before, after):
    run(tmp_path, "step", before)
    # `run_once` compares values, pointers and is_donated at each run.
    found = run(tmp_path, "step", after)
    # THEN it has come upon the entries. torch_xla's CPU client cannot read any ("Deserializing serialized executable
    # not supported"), counts that, and compiles again: a change here means that it can, and they are really used.
    seen = len(set(before) & set(after))
    assert found.counters.get("PersistentCacheDeserializeFailure", 0) == seen
    assert found.counters.get("PersistentCacheMiss", 0) == len(after) - seen
    assert "PersistentCacheHit" not in found.counters
    assert found.compiled == len(after)


def test_a_cache_that_must_not_be_written_is_left_as_it_is(tmp_path):
    run(tmp_path, "step", "d")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    found = run(tmp_path, "step", "pd", readonly=True)
    assert found.new == [("p", []), ("d", [])]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
