"""The TPU compiler without a TPU: lower(...).compile(topology), hlo.compile_for, and sharded placeholders."""

from __future__ import annotations

import copy
import os
import re

import numpy as np
import pytest
import torch
import torch_xla
from children import in_process, run_in_child
from helpers import consume, make, needs_jax
from sharding import mesh, shard
from torch_xla.distributed.spmd import Mesh
from torch_xla.utils.dlpack import to_dlpack

from torch_xla_donate import compile, donate_buffer, hlo, placeholder, placeholder_like
from torch_xla_donate.hlo.dump import copies

pytestmark = needs_jax

F32 = torch.float32


def momentum_sgd(weights, momentum, gradients):
    momentum = [0.9 * m + g for m, g in zip(momentum, gradients)]
    return [w - 0.1 * m for w, m in zip(weights, momentum)], momentum


def arrays(*shapes):
    return [placeholder(shape, F32) for shape in shapes]


@in_process
def test_memory_aliases_and_names_on_a_tpu():
    shapes = ((256, 128), (100,), (7,))
    lowered = compile(momentum_sgd, donate_argnums=(0, 1)).lower(arrays(*shapes), arrays(*shapes), arrays(*shapes))
    here, there = lowered.compile(), lowered.compile("v6e:1x1")
    for executable in (here, there):
        assert sorted(donor.output for donor in executable.donors) == [(i,) for i in range(6)]
        assert sorted(donor.name for donor in executable.donors) == sorted(
            f"{name} (argument {number} of momentum_sgd)"
            for number, name in [(0, f"weights[{i}]") for i in range(3)] + [(1, f"momentum[{i}]") for i in range(3)]
        )
    assert here.memory_analysis().alias_bytes == 2 * 4 * (256 * 128 + 100 + 7)
    # Each vector takes a tile of 512 bytes.
    assert there.memory_analysis().alias_bytes == 2 * (4 * 256 * 128 + 512 + 512)
    assert "input_output_alias=" in there.as_text() and there.topology == "v6e:1x1"
    with pytest.raises(TypeError, match="momentum_sgd was compiled for v6e:1x1, so it cannot be called here"):
        there([], [], [])


def sgd_of_two_layers(weights, x):
    """The backward pass reads the second weight, which the step overwrites."""
    grads = torch.func.grad(lambda ws: (torch.tanh(x @ ws[0]) @ ws[1]).square().mean())(weights)
    return [w - 0.1 * grad for w, grad in zip(weights, grads)]


def gather_and_overwrite_others(table, read, written):
    rows = table[read]
    return table.index_copy(0, written, -rows), rows, table[read + 1]


def square(w):
    return w @ w


@pytest.mark.parametrize(
    ("function", "on_cpu", "on_tpu"),
    [(sgd_of_two_layers, 1, 0), (gather_and_overwrite_others, 1, 0), (square, 1, 1)],
)
@in_process
def test_copies_that_a_donation_adds_are_the_cpu_compilers(function, on_cpu, on_tpu):
    """docs/performance.md says so. 256 MiB do not fit in a TPU's fast memory, where copies cost little."""
    large, indices = (8192, 8192), placeholder((64,), torch.int64)
    arguments = {
        sgd_of_two_layers: (arrays(large, large), placeholder((64, 8192), F32)),
        gather_and_overwrite_others: (*arrays(large), indices, indices),
        square: arrays(large),
    }[function]
    for topology, expected in (((), on_cpu), (("v6e:1x1",), on_tpu)):
        plain, donated = (
            compile(function, donate_argnums=argnums).lower(*arguments).compile(*topology) for argnums in ((), 0)
        )
        counts = [
            sum(shape.bytes == 4 * 8192**2 for shape, _ in copies(executable.as_text()))
            for executable in (plain, donated)
        ]
        assert max(0, counts[1] - counts[0]) == expected, (topology, counts)
        assert donated.memory_analysis().peak_bytes <= plain.memory_analysis().peak_bytes
        assert all(donor.output is not None for donor in donated.donors)


@in_process
def test_small_vectors_that_fit_each_other_keep_their_places():
    """All take 512 bytes on a TPU, so only the order distinguishes them."""
    shapes = [(n,) for n in (9, 7, 100, 3, 128, 1, 64, 33)]

    def rotate(state):
        return [state[i] * 2.0 + 1.0 for i in range(len(state))][::-1]

    executable = compile(rotate, donate_argnums=0).lower(arrays(*shapes)).compile("v6e:1x1")
    after = hlo.parse(executable.as_text())
    assert len(after.aliases) == 8
    for alias in after.aliases:
        assert after.shape_of(alias).dims == after.results[alias.output_index[0]].dims
    # A layout with S(...) is a move to another memory, which every step makes.
    assert not re.search(r"= f32\[\d+\]\{[^}S]*\} copy\(", executable.as_text().partition("\nENTRY")[2])


@in_process
def test_a_donor_whose_padded_size_fits_nothing_says_so():
    def reshaped(x, y):
        return x.reshape(3, 5) + 1.0, y[:100] + 1.0

    executable = compile(reshaped, donate_argnums=(0, 1)).lower(*arrays((15,), (128,))).compile("v5e:1x1")
    # f32[128], f32[100] and f32[15] take 512 bytes each, f32[3,5] takes 2,048.
    x, y = sorted(executable.donors, key=lambda donor: donor.name)
    assert y.output == (1,) and x.output is None
    assert x.reason.startswith(
        "more donors than outputs of its size: 2 donors and 1 output of 512 bytes, padded from 60"
    )


@in_process(devices=4)
def test_sharded_placeholders_are_compiled_for_their_devices():
    def sharded(*spec):
        return placeholder((64, 32), F32, sharding=(mesh(), spec))

    def update(w, g, v):
        return w - 0.1 * g, v + w.sum()

    lowered = compile(update, donate_argnums=(0, 2)).lower(sharded("x", None), sharded("x", None), sharded(None, None))
    assert lowered.as_text().count("sharding={devices=[4,1]0,1,2,3}") == 2
    executable = lowered.compile("v6e:2x2")
    outcomes = {donor.name.partition(" ")[0]: donor for donor in executable.donors}
    assert outcomes["w"].output == (0,) and outcomes["w"].shape.dims == (16, 32)
    assert executable.memory_analysis().argument_bytes < 4 * 3 * 64 * 128
    with pytest.raises(ValueError, match="has 4 partitions, but topology v6e:1x1 has 1 device. "):
        lowered.compile("v6e:1x1")
    # The same on this machine, and as often as one likes.
    assert lowered.compile().memory_analysis().alias_bytes == 4 * (16 * 32 + 64 * 32)
    assert executable.memory_analysis().alias_bytes == 4 * (16 * 128 + 32 * 128)  # 64 columns, padded to 128
    # One that the function closes over keeps its sharding.
    outside = sharded("x", None)
    lowered = compile(lambda x: x @ outside.T).lower(placeholder((8, 32), F32))
    assert "sharding={devices=[4,1]0,1,2,3}" in lowered.as_text()


@in_process(devices=4)
def test_a_real_sharded_tensor_keeps_its_sharding():
    mesh()
    weight = shard(torch.ones(64, 32).to("xla"), "x", None)
    like = placeholder_like({"w": weight})["w"]
    assert torch_xla._XLAC._get_xla_sharding_spec(like) == torch_xla._XLAC._get_xla_sharding_spec(weight)
    lowered = compile(lambda w: w + 1.0, donate_argnums=0).lower(like)
    (donor,) = lowered.compile("v6e:2x2").donors
    assert donor.output is not None and donor.shape.dims == (16, 32)


@in_process
def test_a_module_on_meta_and_its_optimizer():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64, bias=False))
        model[1].weight = torch.nn.Parameter(model[0].weight.T.contiguous())
        model.tied = model[0].bias
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    copied, copied_optimizer = placeholder_like((model, optimizer))
    assert copied.tied is copied[0].bias and copied[0].bias.device.type == "xla"
    assert {*map(id, copied_optimizer.param_groups[0]["params"])} == {*map(id, copied.parameters())}
    assert copied_optimizer.state[copied[0].weight]["step"].item() == 1
    assert model[0].weight.device.type == "meta"

    def train(model, optimizer, batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = placeholder((8, 64), F32)
    donors = compile(train).lower(copied, copied_optimizer, batch).compile().donors
    assert len(donors) == 9 and all(donor.output is not None for donor in donors)
    assert all(donor.name for donor in donors)


USES = {
    "operation": lambda t: t + 1,
    "in place": lambda t: t.add_(1),
    "read": lambda t: t.tolist(),
    "print": str,
    "comparison": lambda t: torch.equal(t, torch.ones(4).to("xla")),
    "deep copy": lambda t: copy.deepcopy(t).tolist(),
    "view": lambda t: t.view(2, 2).sum().item(),
    "dlpack": to_dlpack,
    "lazy": lambda t: compile(lambda a: a + 1)(t),
    "pure": lambda t: compile(lambda a: a + 1, pure=True)(t),
    "mark": donate_buffer,
}


@pytest.mark.parametrize("is_lowered", [False, True])
@in_process
def test_a_use_of_a_placeholder_raises_and_loses_nothing(is_lowered):
    empty, w, x = placeholder((4,), F32), make(4), make(4)
    closed_over = [empty]

    def outside(a):
        return a * closed_over[0]

    if is_lowered:  # the trace computes with the placeholder
        compile(lambda a: a * 2, donate_argnums=0).lower(empty).compile()
        compile(outside).lower(w)
    w.mul_(2)
    y = x * 3
    for use in USES.values():
        with pytest.raises(RuntimeError, match="A placeholder has no value, so only lower"):
            use(empty)
    with pytest.raises(RuntimeError, match="A placeholder has no value, so only lower"):
        compile(outside)(x)
    torch_xla.sync(wait=True)
    assert (w.tolist(), y.tolist()) == ([0, 2, 4, 6], [0, 3, 6, 9])
    del empty
    closed_over.clear()
    assert consume(x, wait=True).tolist() == [1, 2, 3, 4]


@in_process
def test_a_tensor_of_eight_bit_floats_is_lowered():
    for dtype, array in ((torch.float8_e5m2, "f8e5m2[4]"), (torch.float8_e4m3fn, "f8e4m3fn[4]")):
        t = make(4).to(dtype)
        torch_xla.sync()
        assert array in compile(lambda a: a.float()).lower(t).as_text()


@in_process
def test_a_copied_module_keeps_its_gradients():
    model = torch.nn.Linear(64, 64, bias=False).to("xla")
    model(torch.ones(2, 64, device="xla")).sum().backward()
    torch_xla.sync()

    def accumulate(model, batch):
        model(batch).sum().backward()

    batch = placeholder((2, 64), F32)
    real, copied = (
        compile(accumulate).lower(one, batch).compile().memory_analysis() for one in (model, placeholder_like(model))
    )
    assert real == copied
    assert copied.alias_bytes >= 64 * 64 * 4


@in_process
def test_bad_placeholders_and_bad_uses_of_one_are_refused():
    for arguments, error, text in (
        (((-1, 4), F32), ValueError, r"placeholder got shape=\(-1, 4\). Give sizes of 0 or more."),
        (((4,), torch.quint8), TypeError, "a placeholder of dtype torch.quint8 cannot be made"),
        (((4,), "float32"), TypeError, "a placeholder of dtype 'float32' cannot be made"),
    ):
        with pytest.raises(error, match=text):
            placeholder(*arguments)
    x = placeholder((4,), F32)
    with pytest.raises(ValueError, match=r"a \(argument 0 of .*\) is donated, and b \(.*has the same buffer"):
        compile(lambda a, b: a + b, donate_argnums=0).lower(x, x)
    with pytest.raises(ValueError, match="computes nothing on the device, so it cannot be compiled for v6e:1x1"):
        compile(lambda x: None).lower(x).compile("v6e:1x1")


@pytest.mark.filterwarnings("ignore:.*(prototype|beta state|under heavy development):UserWarning")
@in_process
def test_tensors_that_are_not_dense_have_no_placeholder():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tree in (torch.nn.LazyLinear(4), {"x": nested}, {"x": torch.eye(3).to_sparse()}, torch.eye(4).to_sparse_csr()):
        with pytest.raises(TypeError, match=r"tree.* is of type .* and is not a dense array. Call a lazy module once"):
            placeholder_like(tree)


@in_process(devices=4)
def test_bad_shardings_are_refused():
    cut = Mesh(np.arange(4), (4,), ("model",))
    with pytest.raises(ValueError, match=r"got the sharding \('model', None\), but SPMD is off"):
        placeholder((8, 4), F32, sharding=(cut, ("model", None)))
    mesh()
    with pytest.raises(ValueError, match="Give a mesh axis or None for each of its 2 dimensions"):
        placeholder((8, 4), F32, sharding=(cut, ("model",)))
    with pytest.raises(ValueError, match=r"which the mesh of axes \('model',\) refuses"):
        placeholder((8, 4), F32, sharding=(cut, ("rows", None)))
    with pytest.raises(TypeError, match=r"Give \(mesh, partition_spec\)"):
        placeholder((8, 4), F32, sharding="model")


@in_process
def test_a_dump_of_a_step_keeps_its_donors(dump_folder):
    t, other = torch.ones(256, 128).to("xla"), torch.ones(100).to("xla")
    torch_xla.sync(wait=True)
    kept = consume([t, other], lambda tensors: [t * 2 for t in tensors], wait=True)
    (module,) = [module for module in hlo.read_dump(dump_folder) if module.donors]
    assert module.before is not None and module.before.path is not None
    compiled = hlo.compile_for(module.before.path, "v6e:1x1")
    assert [donor.output is not None for donor in compiled.donors] == [True, True]
    assert compiled.memory.alias_bytes == 4 * 256 * 128 + 512
    assert len([found for found in hlo.read_dump(dump_folder) if found.donors]) == 1  # the compiler dumps nothing there
    assert len(kept) == 2


NESTED = """HloModule nested, buffer_donor={ (0, {1}) }, entry_computation_layout={((f32[100]{0}, f32[256,128]{1,0}))->(f32[100]{0}, (f32[256,128]{1,0}))}

ENTRY %main (p: (f32[100], f32[256,128])) -> (f32[100], (f32[256,128])) {
  %p = (f32[100]{0}, f32[256,128]{1,0}) parameter(0)
  %a = f32[100]{0} get-tuple-element(%p), index=0
  %b = f32[256,128]{1,0} get-tuple-element(%p), index=1
  %c = f32[256,128]{1,0} add(%b, %b)
  %d = f32[100]{0} add(%a, %a)
  %n = (f32[256,128]{1,0}) tuple(%c)
  ROOT %t = (f32[100]{0}, (f32[256,128]{1,0})) tuple(%d, %n)
}
"""  # noqa: E501


def test_wrapped_parameters_and_nested_results_have_the_programs_index():
    """torch_xla wraps the parameters of a large graph; the TPU compiler flattens results."""
    module = hlo.compile_for(NESTED, "v6e:1x1")
    (donor,) = module.donors
    assert (donor.shape.dims, donor.output, len(module.after.parameters)) == ((256, 128), (1, 0), 2)


def sharded_by_jax(shardy: bool) -> str:
    """In a child: the HLO of a function that JAX has sharded over four devices."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_use_shardy_partitioner", shardy)
    rows = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("m",)), PartitionSpec("m", None))
    f = jax.jit(lambda a: a + 1, donate_argnums=0, in_shardings=rows)
    return str(f.lower(jax.numpy.ones((256, 128))).compiler_ir("hlo").as_hlo_text())


@pytest.mark.parametrize("shardy", [False, True])
def test_a_sharded_module_of_jax_keeps_its_sharding(shardy):
    text = run_in_child(sharded_by_jax, shardy, devices=4).value
    assert ("xla.sdy." in text) == shardy
    module = hlo.compile_for(text, "v6e:2x2")
    (donor,) = module.donors
    assert (module.num_devices, donor.shape.dims, donor.output is not None) == (4, (64, 128), True)


BIG = """HloModule big, entry_computation_layout={(f32[65536,65536]{1,0}, f32[65536,65536]{1,0})->f32[65536,65536]{1,0}}

ENTRY %main (p: f32[65536,65536], q: f32[65536,65536]) -> f32[65536,65536] {
  %p = f32[65536,65536]{1,0} parameter(0)
  %q = f32[65536,65536]{1,0} parameter(1)
  %d = f32[65536,65536]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %a = f32[65536,65536]{1,0} dot(%d, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
SMALL = BIG.replace("65536", "128")


@pytest.mark.parametrize(
    ("text", "topology", "error", "message"),
    [
        (
            BIG,
            "v6e:1x1",
            RuntimeError,
            r"does not fit on a device of v6e:1x1: Used 40.00G of 31.25G hbm .*arguments 32.00G",
        ),
        (SMALL, "v6e:3", ValueError, "topology 'v6e:3' does not exist .*v6e:4x8"),
        (SMALL, "", ValueError, "topology '' does not exist. Use GENERATION:CHIPS"),
        (SMALL, 8, ValueError, "topology 8 does not exist. Use GENERATION:CHIPS"),
        (SMALL.replace("dot(", "dott("), "v6e:1x1", ValueError, "module big is not HLO that XLA can read"),
        (SMALL.replace("f32", "c128"), "v6e:1x1", RuntimeError, "the compiler refused module big for v6e:1x1"),
        ("\n" + SMALL.replace(" big", " big, is_scheduled=true"), "v6e:1x1", ValueError, "after optimisat"),
        (SMALL.replace(" big", " big, replica_count=4"), "v6e:2x2", ValueError, "module big has 4 replicas"),
    ],
    ids=[
        *("memory", "chips", "empty", "number"),
        *("text", "dtype", "scheduled", "replicas"),
    ],
)
def test_what_cannot_be_compiled_says_why(text, topology, error, message):
    with pytest.raises(error, match=message):
        hlo.compile_for(text, topology)


@in_process
def test_without_the_compiler_the_error_says_what_to_install(tmp_path):
    (tmp_path / "libtpu.py").write_text("raise ImportError('not here')", encoding="utf-8")
    os.environ["PYTHONPATH"] = str(tmp_path)
    with pytest.raises(ImportError, match=r'compiling for v6e:1x1 needs .*pip install "torch_xla_donate\[tpu\]"'):
        hlo.compile_for(SMALL, "v6e:1x1")
