"""compile() in processes of their own: the dump of each backend, settings of the environment, and SPMD."""

from __future__ import annotations

import functools

import pytest
import torch
import torch_xla
from children import in_process, run_in_child
from helpers import each_backend, each_trace, make
from sharding import mesh, shard
from torch_xla.distributed.spmd import mark_sharding

from torch_xla_donate import _C, DonationError, compile, hlo, is_donated

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


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


@each_trace
@pytest.mark.parametrize("env", [{"XLA_ENABLE_PARAM_ALIASING": "0"}, {"XLA_STABLEHLO_COMPILE": "1"}], ids=str)
@in_process(env=lambda env: env)
def test_a_setting_that_ignores_donors_keeps_the_arguments(options, env):
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
