"""compile() in processes of their own: dumps, settings, SPMD, the persistent cache, and lower()."""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from children import in_process, run_in_child
from helpers import BACKENDS, compiles, each_backend, error_of, make, pointer
from sharding import mesh, shard
from torch_xla.core import xla_builder
from torch_xla.distributed.spmd import mark_sharding

import torch_xla_donate
from torch_xla_donate import _C, DonationError, DonationWarning, compile, donate_buffer, hlo, is_donated


@each_backend
@in_process
def test_the_dump_shows_the_donors_and_where_their_memory_went(options, dump_folder):
    @functools.partial(compile, donate_argnums=0, **options)
    def update(state, delta):
        return [t + delta.sum() for t in state]

    state, delta = [torch.ones(64, 3).to("xla"), torch.zeros(64, 3).to("xla")], make(3)
    for _ in range(3):
        old, state = state, update(state, delta)
        assert [is_donated(t) for t in (*old, delta)] == [True, True, False]
    assert [t.sum().item() for t in state] == [192 * 10, 192 * 9]
    (module,) = [module for module in hlo.read_dump(dump_folder) if module.donors]
    assert [module.shape_of(donor).dims for donor in module.before.donors] == [(64, 3)] * 2
    assert len(module.before.parameters) == 3
    assert {alias.donor for alias in module.after.aliases} == set(module.before.donors)


def read_inside(x):
    return x * x.sum().item()


@in_process
def test_full_graph_is_passed_to_torch_xla():
    x = make(3)
    with pytest.raises(RuntimeError, match="Unexpected execution happens inside the compiled function"):
        compile(read_inside, donate_argnums=0, full_graph=True)(x)
    assert x.tolist() == [0, 1, 2]
    assert _C.pending() == []


def run_under_a_name():
    compile(read_inside, donate_argnums=0, name="named_graph")(torch.ones(3).to("xla"))


def test_the_name_is_passed_to_torch_xla():
    done = run_in_child(run_under_a_name, env={"PT_XLA_DEBUG_LEVEL": "2"})
    assert "Graph Name: named_graph" in done.stderr


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@pytest.mark.parametrize("env", [{"XLA_ENABLE_PARAM_ALIASING": "0"}, {"XLA_STABLEHLO_COMPILE": "1"}], ids=str)
@in_process(env=lambda env: env)
def test_a_setting_that_ignores_donors_keeps_the_arguments(env):
    for options in (BACKENDS["pure"], BACKENDS["openxla"]):
        g = compile(lambda *a: [x * (i + 1) for i, x in enumerate(a)], donate_argnums=0, **options)
        for _ in range(2):
            xs = [torch.arange(3.0).to("xla") + i for i in range(6)]
            torch_xla.sync()
            assert [t.tolist() for t in g(*xs)] == [[(k + i) * (i + 1) for k in range(3)] for i in range(6)]
            assert not any(map(is_donated, xs))


@in_process(devices=4)
def test_a_sharded_tensor_is_donated_in_its_wrapper_and_named():
    cut, w = mesh(), torch.arange(32.0).reshape(8, 4).to("xla")
    wrapper = mark_sharding(w, cut, ("x", None))
    torch_xla.sync(wait=True)
    assert compile(lambda x: x + 1, donate_argnums=0, pure=True)(wrapper).cpu()[0, 1].item() == 2
    assert is_donated(w)
    w = shard(make(8, 4), "x", None)
    with pytest.raises(DonationError, match="closes over"):
        compile(lambda x: x + w, pure=True)(w)


@in_process(devices=4)
def test_float_arguments_are_replicated_under_spmd():
    mesh()
    w = shard(make(8, 4), "x", None)
    first = w.cpu()
    f = compile(lambda w, n: w * (1 - n), donate_argnums=0, pure=True, strict=True)
    for n in (0.5, 0.75):
        w = f(w, n)
    assert torch.equal(w.cpu(), first * 0.125)
    assert len(f._programs) == 1


# --- The persistent cache: donating and plain runs of a graph are two entries, each with its own aliasing ---


class Runs(NamedTuple):
    new: list[tuple[str, list[str]]]  #: of each run, donating (d) or plain (p): the entries that it made
    counters: dict[str, int]
    compiled: int


def run(folder: Path, kind: str, order: str) -> Runs:
    """Runs the same function in a child, donating (d) or not (p), in the order given."""
    return run_in_child(run_all, folder, kind, order).value


def run_all(folder: Path, kind: str, order: str) -> Runs:
    xr.initialize_cache(str(folder))
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


@pytest.mark.parametrize("kind", ["step", "pure", "openxla"])
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


@pytest.mark.parametrize(("before", "after"), [("dp", "pd"), ("d", "p")])
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


# --- lower() ---


@pytest.mark.parametrize(
    ("name", "value", "pure"),
    [
        ("XLA_ENABLE_PARAM_ALIASING", "0", False),
        ("XLA_ENABLE_PARAM_ALIASING", "0", True),
        ("XLA_STABLEHLO_COMPILE", "1", False),
        ("XLA_AUTO_SPMD", "1", True),
    ],
)
@in_process(env=lambda name, value: {name: value})
def test_settings_that_ignore_donors_lower_without_and_warn_once(name, value, pure):
    def update(w, g):
        model.weight.data.sub_(g[:4])
        return w - g

    model = torch.nn.Linear(4, 4).to("xla")
    before = model.weight.tolist()
    w, g = torch.ones(8, 4).to("xla"), torch.ones(8, 4).to("xla")
    torch_xla.sync(wait=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # A pure function does not update tensors of others.
        for f in (lambda w, g: w - g, *([] if pure else [update])):
            step = compile(f, donate_argnums=0, pure=pure)
            lowered = step.lower(w, g)
            assert not lowered.args_info[0][0].donated and "buffer_donor" not in lowered.as_text()
            executable = lowered.compile()
            assert executable.memory_analysis().alias_bytes == 0
            assert model.weight.tolist() == before
            assert executable(w, g).tolist() == [[0.0] * 4] * 8 and w.tolist() == [[1.0] * 4] * 8
    (warning,) = [w for w in caught if w.category is DonationWarning]
    assert f"{name}={value}" in str(warning.message) and " switches donation off" in str(warning.message)


@pytest.mark.filterwarnings("ignore::UserWarning")
@in_process
def test_auto_sharding_needs_arguments_with_memory():
    xr.use_spmd(auto=True)
    argument = xla_builder.create_placeholder_tensor((8, 4), torch.float32)
    lowered = compile(lambda x: x + 1, donate_argnums=0).lower(argument)
    error = error_of(DonationError, lowered.compile)
    assert error.startswith("<lambda> cannot be compiled for the placeholder float32[8,4], because torch_xla ")
    assert "call xr.use_spmd() and mark the shardings. See `python -m torch_xla_donate explain ahead`." in error
    t = torch.ones(8, 4).to("xla")
    assert (t + 1).tolist() == [[2.0] * 4] * 8
