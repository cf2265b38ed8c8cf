"""SPMD on 4 and 8 devices: what the HLO of a step says, and what became of the buffers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from children import in_process, run_in_child
from helpers import BACKENDS, consume, each_backend, each_trace, error_of
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from torch_xla_donate import (
    _C,
    DonationWarning,
    _host,
    advise,
    compile,
    donate_buffer,
    donation_report,
    hlo,
    is_donated,
)

DEVICES = 8
# The mesh has 2 x 4 devices. Each dimension of the array is cut along these axes.
SPECS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rows": (("a", "b"), ()),
    "columns": ((), ("a", "b")),
    "whole": ((), ()),
    "tiles": (("a",), ("b",)),
    "half": (("a",), ()),  # on two halves of the devices
}
# For an output also None, if the compiler chooses the sharding.
KNOWN = [*itertools.product(SPECS, SPECS)]
INFERRED = [(donor, None) for donor in SPECS if donor != "whole"]
ALONE = [("rows", "rows"), ("rows", None), ("half", "half"), ("half", "rows"), ("whole", "tiles"), ("columns", "half")]
EVEN, UNEVEN = (8, 16), (6, 5)  # and odd multiples, which all of the shardings divide evenly, and which most do not

ROWS, COLUMNS, WHOLE = SPECS["rows"], SPECS["columns"], SPECS["whole"]
Spec = tuple[tuple[str, ...], ...]


# --- In the children ---


@functools.cache
def mesh() -> xs.Mesh:
    xr.use_spmd()
    count = xr.global_runtime_device_count()
    return xs.Mesh(np.arange(count), (2, count // 2), ("a", "b"))


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def named(spec: Spec) -> tuple[tuple[str, ...] | None, ...]:
    return tuple(axes or None for axes in spec)


def shard(t: torch.Tensor, spec: Spec | None) -> torch.Tensor:
    if spec is not None:
        xs.mark_sharding(t, mesh(), named(spec))
    return t


def make(shape: tuple[int, ...], spec: Spec | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    mesh()
    t = shard(values(*shape, dtype=dtype).to("xla"), spec)
    torch_xla.sync(wait=True)
    return t


# --- All pairs ---


def measure(plan: list[list[Case]]) -> list[dict[str, Any]]:
    """Runs the steps; what happened to each case."""
    warnings.simplefilter("ignore")  # of the donations that are unusable, as they should be
    results = []
    for step in plan:
        made = [make(case.shape, SPECS[case.donor]) for case in step]
        outputs = [shard(x * 2 + 1, case.output and SPECS[case.output]) for x, case in zip(made, step)]
        donate_buffer(made)
        marks = {mark.name: mark for mark in donation_report().pending}
        torch_xla.sync(wait=True)
        donors = {donor.name: donor for donor in donation_report(steps=1).donors}
        for index, (x, y, case) in enumerate(zip(made, outputs, step)):
            mark, donor = marks[f"[{index}]"], donors[f"[{index}]"]
            results.append(
                {
                    "bytes": [mark.bytes_per_device, donor.bytes_per_device],
                    "sharding": [mark.sharding, donor.sharding],
                    "outcome": donor.outcome,
                    "reason": donor.reason,
                    "has_value": _C.has_value(x),
                    "is_donated": is_donated(x),
                    "right": torch.equal(y.cpu(), values(*case.shape) * 2 + 1),
                    "kept": is_donated(x) or torch.equal(x.cpu(), values(*case.shape)),
                }
            )
    return results


@dataclasses.dataclass(frozen=True)
class Case:
    """A donor and the output that is made of it, both of this shape."""

    shape: tuple[int, int]
    donor: str
    output: str | None
    alone: bool = False  # the only output of its step

    def __str__(self) -> str:
        alone = ", alone" if self.alone else ""
        return f"{self.donor} to {self.output}, {list(self.shape)}{alone}"

    @property
    def donor_bytes(self) -> int:
        """Of the largest piece: XLA pads the others."""
        return self._bytes(self.donor)

    @property
    def output_bytes(self) -> int:
        """XLA keeps the only output of a step whole if its sharding does not cut it evenly."""
        spec = self.output or self.donor
        whole = self.alone and not self.is_even(spec)
        return self._bytes("whole" if whole else spec)

    def is_even(self, spec: str) -> bool:
        return all(size % cut == 0 for size, cut in zip(self.shape, self._pieces(spec)))

    def _pieces(self, spec: str) -> list[int]:
        axes = {"a": 2, "b": DEVICES // 2}
        return [math.prod(axes[axis] for axis in dimension) for dimension in SPECS[spec]]

    def _bytes(self, spec: str) -> int:
        return 4 * math.prod(-(-size // cut) for size, cut in zip(self.shape, self._pieces(spec)))


def side_by_side(pairs: list[tuple[Any, ...]]) -> list[Case]:
    """Cases for one step: their shapes are such that a donor has the size of no output but perhaps its own."""
    cases: list[Case] = []
    taken: set[int] = set()
    factors = itertools.count(1, 2)
    for base, *pair in pairs:
        for factor in factors:
            case = Case((base[0], base[1] * factor), *pair)
            sizes = {case.donor_bytes, case.output_bytes}
            if not sizes & taken:
                taken |= sizes
                cases.append(case)
                break
    return cases


def steps() -> list[list[Case]]:
    return [
        side_by_side([(EVEN, *pair) for pair in KNOWN]),
        side_by_side([(UNEVEN, *pair) for pair in KNOWN]),
        side_by_side([(EVEN, *pair) for pair in INFERRED]),
        side_by_side([(UNEVEN, *pair) for pair in INFERRED]),
        side_by_side([(EVEN, "whole", None), (UNEVEN, "whole", None)]),  # where nothing is sharded
        *[[Case(UNEVEN, *pair, alone=True)] for pair in ALONE],
    ]


def test_the_hlo_the_report_and_the_buffer_agree(tmp_path: Path) -> None:
    planned = steps()
    results = iter(run_in_child(measure, planned, devices=DEVICES, dump=tmp_path).value)
    modules = [module for module in hlo.read_dump(tmp_path) if module.donors]
    assert [len(module.donors) for module in modules] == [len(step) for step in planned]
    reasons = 0
    for case, module in ((case, module) for step, module in zip(planned, modules) for case in step):
        result = next(results)
        # GIVEN what each device holds of the donor
        assert result["bytes"] == [case.donor_bytes] * 2, case
        assert case.donor_bytes in [module.shape_of(donor).bytes for donor in module.donors], case
        # THEN the step did what the HLO after optimisation says, and the report says the same
        used = case.donor_bytes in [module.shape_of(alias).bytes for alias in module.aliases]
        assert (result["outcome"] == "donated") is result["is_donated"] is (not result["has_value"]) is used, case
        assert result["right"], case
        assert result["kept"], case
        # ... which follows from the bytes
        assert used is (case.donor_bytes == case.output_bytes), case
        # AND the reason names the shardings
        if used:
            assert result["reason"] == "", case
        else:
            assert_reason(case, result["reason"], result["sharding"][1])
            reasons += 1
    cases = Counter(case.donor for step in planned for case in step)
    assert all(cases[donor] > 11 for donor in SPECS)
    assert reasons > 20


def assert_reason(case: Case, reason: str, sharding: str) -> None:
    assert reason.startswith(
        f"an output has its size of {4 * math.prod(case.shape)} bytes, but not per device: the donor, sharded "
        f"{sharding}, takes {case.donor_bytes} bytes on each device, and the output f32["
    ), case
    whole = case.alone and not case.is_even(case.donor) and case.output != "half"
    assert reason.endswith("do not divide it evenly, so pad it" if whole else "shard donor and output alike"), case


@in_process(devices=4)
def test_of_two_donors_for_one_output_the_unused_has_a_reason():
    first, second, third = make((8, 4), ROWS), make((8, 4), COLUMNS), make((4, 2))  # 32 bytes on each device
    out = shard(first + second + third.sum(), ROWS)
    donate_buffer({"first": first, "second": second, "third": third})
    with pytest.warns(DonationWarning):
        torch_xla.sync(wait=True)
    report = donation_report(steps=1)
    happened = {donor.name: donor.outcome for donor in report.donors}
    assert sorted(happened.values()) == ["donated", "unusable", "unusable"]
    reasons = {donor.reason for donor in report.donors if donor.reason}
    assert reasons == {"more donors than outputs of its size: 3 donors and 1 output of 32 bytes on each device"}
    assert torch.equal(out.cpu(), values(8, 4) * 2 + 28)


# --- Modules, regions of the user's own, compiled functions ---


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@in_process(devices=4)
def test_a_fully_sharded_module_donates_and_gives_the_same_bits(dump_folder):
    xr.use_spmd()
    count = xr.global_runtime_device_count()
    devices = xs.Mesh(np.arange(count), (count, 1), ("fsdp", "model"))
    torch.autograd.set_multithreading_enabled(False)

    def train(donate: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
        model = SpmdFullyShardedDataParallel(torch.nn.Sequential(*layers).to("xla"), mesh=devices)
        for step in range(3):
            torch.manual_seed(step)
            batch = torch.randn(8, 8).to("xla")
            xs.mark_sharding(batch, devices, ("fsdp", None))
            torch_xla.sync()
            gradients = torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))
            if donate:
                donate_buffer(model)
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter.data = parameter.detach() - 0.1 * gradient
            del gradients, gradient
            torch_xla.sync(wait=True)
            if donate:
                assert [donor.outcome for donor in donation_report(steps=1).donors] == ["donated"] * 4
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True)))
    whole = [module for module in hlo.read_dump(dump_folder) if len(module.donors) == 4]
    assert whole
    assert all(len(module.aliases) == 4 for module in whole)
    # 16 x 8 weights, 16 biases, 4 x 16 weights, 4 biases: a quarter of each.
    assert {module.aliased_bytes for module in whole} == {(16 * 8 + 16 + 4 * 16 + 4) * 4 // 4}


def region(x: torch.Tensor, y: torch.Tensor, spec: Spec) -> torch.Tensor:
    inside = xs.enable_manual_sharding(x, named(spec)).global_tensor
    other = xs.enable_manual_sharding(y, named(spec)).global_tensor
    return xs.disable_manual_sharding(inside * 2 + other, named(spec), x.shape).global_tensor


@in_process(devices=4)
def test_donors_go_through_a_manual_region(dump_folder):
    xs.set_global_mesh(mesh())

    def is_right(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> bool:
        return torch.equal(z.cpu(), values(8, 16) * 3) and torch.equal(y.cpu(), values(8, 16))

    results = []
    for spec in (ROWS, SPECS["tiles"], SPECS["half"]):
        for given in (spec, None):  # sharded before, or by the region
            x, y = make((8, 16), given), make((8, 16), spec)
            z = region(x, y, spec)
            donate_buffer(x)
            torch_xla.sync(wait=True)
            right = is_right(x, y, z)  # a read: the step has run when it returns
            results.append([is_donated(x), _C.has_value(x), right])
    for options in ({}, {"pure": True}):
        g = compile(lambda x, y: region(x, y, ROWS), donate_argnums=0, **options)
        for _ in range(3):
            x, y = make((8, 16), ROWS), make((8, 16), ROWS)
            z = g(x, y)
            right = is_right(x, y, z)
            results.append([is_donated(x), _C.has_value(x), right])
    assert results == [[True, False, True]] * 12
    # A donor for an output that stays whole is refused with a warning.
    x = make((8, 16), ROWS)
    z = shard(region(x, make((8, 16), ROWS), ROWS) + 1, WHOLE)
    donate_buffer(x)
    with pytest.warns(DonationWarning) as caught:
        torch_xla.sync(wait=True)
    assert torch.equal(z.cpu(), values(8, 16) * 3 + 1)
    assert torch.equal(x.cpu(), values(8, 16))
    modules = [module for module in hlo.read_dump(dump_folder) if module.donors]
    assert all(len(module.aliases) == 1 for module in modules[:-1])
    (warning,) = [str(warning.message) for warning in caught]
    text = (
        "but not per device: the donor, sharded {devices=[4,1]0,1,2,3}, takes 128 bytes on each device, and the output"
    )
    assert text in warning


def same(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2 + 1, y + 1


def none(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(), y + 1


def check(f: Callable[..., Any], donor_spec: Spec | None, other_spec: Spec | None, offset: int, g: Any) -> list[Any]:
    x, y = make((8, 16), donor_spec), make((4, 4), other_spec)
    x_then, y_then = x + offset, y - offset
    torch_xla.sync(wait=True)
    host = values(8, 16) + offset, values(4, 4) - offset
    outputs = g(x_then, y_then)
    right = all(torch.equal(a.cpu(), b) for a, b in zip(outputs, f(*host)))
    (donor,) = donation_report(steps=1).donors
    kept = torch.equal(y_then.cpu(), host[1]) and (is_donated(x_then) or torch.equal(x_then.cpu(), host[0]))
    return [right, kept, is_donated(x_then), _C.has_value(x_then), donor.outcome, donor.reason]


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@each_backend
@in_process(devices=4)
def test_compiled_functions_donate_sharded_arguments_or_say_why(dump_folder, options):
    results = []
    for f in (same, none):
        g = compile(f, donate_argnums=0, **options)
        # Changing shardings, and the same ones again: a graph is never run for another sharding than its own.
        specs = (ROWS, WHOLE, COLUMNS, None, SPECS["half"], ROWS, None)
        for offset, (donor_spec, other_spec) in enumerate(zip(specs, reversed(specs))):
            results.extend(check(f, donor_spec, other_spec, offset + again, g) for again in range(2))
    donated, refused = results[:14], results[14:]
    assert [result[:5] for result in donated] == [[True, True, True, False, "donated"]] * 14
    assert [result[:5] for result in refused] == [[True, True, False, True, "unusable"]] * 14
    assert all(" on each device (outputs: " in reason for *_, reason in refused)
    # Arguments without a sharding are donated at every call.
    g = compile(same, donate_argnums=0, **options)
    for _ in range(8):
        x, y = make((8, 16)), make((4, 4))
        outputs = g(x, y)
        assert torch.equal(outputs[0].cpu(), values(8, 16) * 2 + 1)
        assert is_donated(x)
        assert not _C.has_value(x)
        assert donation_report(steps=1).donors[0].outcome == "donated"
    modules = [module for module in hlo.read_dump(dump_folder) if module.donors]
    assert any(module.aliases for module in modules)
    assert any(not module.aliases for module in modules)
    # GIVEN each module's donor is one argument THEN what it holds on a device is what was taken over
    for module in modules:
        assert len(module.donors) == 1
        assert module.aliased_bytes in (0, module.shape_of(module.donors[0]).bytes)


@in_process(devices=4)
def test_a_sharded_result_of_a_pure_function_is_that_of_each_call():
    """xs.mark_sharding returns a wrapper, and so do operations on it."""
    g = compile(lambda x: xs.mark_sharding(x * 2, mesh(), named(ROWS)), donate_argnums=0, pure=True)
    for number in range(3):
        x = make((8, 16), ROWS) + number
        torch_xla.sync()
        assert torch.equal(g(x).cpu(), (values(8, 16) + number) * 2)
        assert is_donated(x)


@in_process(devices=4)
def test_sharded_indices_that_torch_xla_computes_in_32_bits_keep_dtype_and_sharding():
    g = compile(lambda x: (x + 1, torch.cummax(x, 1)[1]), donate_argnums=0, pure=True)
    for _ in range(3):
        y, indices = g(make((8, 16), ROWS))
        assert indices.dtype == torch.int64
        assert _host.sharding_spec(indices) == _host.sharding_spec(y) != ""
        assert torch.equal(indices.cpu(), torch.arange(16).expand(8, 16))


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@each_trace
@in_process(devices=4)
def test_an_argument_that_shares_a_constant_of_the_graph(options):
    """torch_xla has one buffer for both: the constant would follow the argument of later calls."""
    for donated in ((), 0, (0, 1)):
        step = compile(lambda x, s: (x * 6.5, x + s), donate_argnums=donated, **options)
        for number in (6.5, 2.5):
            x, s = make((8, 16), ROWS), torch.full((), number, device="xla")
            torch_xla.sync()
            product, total = step(x, s)
            assert torch.equal(product.cpu(), values(8, 16) * 6.5), donated
            assert torch.equal(total.cpu(), values(8, 16) + number), donated


@in_process(devices=4)
def test_sharding_inside_torch_compile_breaks_the_graph():
    def f(x):
        if x.device.type == "xla":
            x = xs.mark_sharding_with_gradients(x * 2, mesh(), (None, None))
        return x + 1

    g = compile(f, donate_argnums=0, backend="openxla")
    mesh()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = make((8, 16))
            out = g(x)
            assert torch.equal(out.cpu(), values(8, 16) * 2 + 1)
            assert not is_donated(x)
    (warning,) = [str(w.message) for w in caught if "not usable" in str(w.message)]
    assert "torch.compile broke the function's graph" in warning


@in_process(devices=4)
def test_a_mark_ends_when_its_tensor_is_sharded_before_the_step():
    """It may be made again."""
    sharded, overwritten, dropped, kept = (make((8, 16)) for _ in range(4))
    donate_buffer({"sharded": sharded, "overwritten": overwritten, "dropped": dropped, "kept": kept})
    shard(sharded, ROWS)
    overwritten.copy_(values(8, 16).to("xla") + 1)
    del dropped
    out = [sharded * 2, kept * 2]
    with pytest.warns() as caught:
        torch_xla.sync(wait=True)
    outcomes = [[donor.name, donor.outcome] for donor in donation_report().donors]
    assert outcomes == [["['sharded']", "unusable"], ["['kept']", "donated"]]
    assert torch.equal(sharded.cpu(), values(8, 16))
    assert torch.equal(overwritten.cpu(), values(8, 16) + 1)
    assert is_donated(kept)
    assert _C.sizes()["pending"] == 0
    (warning,) = [str(warning.message) for warning in caught]
    assert "xs.mark_sharding" in warning
    assert "overwritten" not in warning
    assert torch.equal(out[1].cpu(), values(8, 16) * 2)

    t = make((8, 16))
    donate_buffer(t, strict=True)
    shard(t, ROWS)
    donate_buffer(t, strict=True)
    again = shard(t * 2, ROWS)
    torch_xla.sync(wait=True)  # a warning would be an error
    assert is_donated(t)
    assert torch.equal(again.cpu(), values(8, 16) * 2)


@in_process(devices=4)
def test_a_mark_of_an_overwritten_and_read_tensor_ends_silently():
    for spec in (None, ROWS):
        t = make((8, 16), spec)
        donate_buffer(t)
        t.copy_(values(8, 16) + 1)
        assert torch.equal(t.cpu(), values(8, 16) + 1)
        out = t * 2  # which gives it a buffer, before a step
        torch_xla.sync(wait=True)  # a warning would be an error
        assert not donation_report(steps=1).donors and _C.pending() == []
        assert torch.equal(out.cpu(), values(8, 16) * 2 + 2)


# --- Views, overwrites, returned arguments and pairs ---


@in_process(devices=4)
def test_views_of_sharded_tensors_keep_their_value():
    for spec in (ROWS, COLUMNS, WHOLE):
        t = make((8, 8), spec)
        t.add_(1)
        torch_xla.sync(wait=True)
        copy = values(8, 8) + 1
        before = t[1:5]
        donate_buffer(t)
        taken = [t[1], t.t(), before[0], before.detach(), before.data, t.split(2)[1]]
        expected = [copy[1], copy.t(), copy[1], copy[1:5], copy[1:5], copy[2:4]]
        result = t * 2
        torch_xla.sync(wait=True)
        assert is_donated(t)
        for view, value in zip(taken, expected):
            assert torch.equal(view.cpu(), value), (spec, view.shape)
        assert torch.equal(result.cpu(), copy * 2)


@in_process(devices=4)
def test_a_sharded_tensor_is_usable_again_after_an_overwrite():
    for overwrite in (torch.Tensor.zero_, lambda t: t.fill_(0), lambda t: torch.zeros(8, out=t)):
        t = make((8,), (("a", "b"),))
        new = consume(t, wait=True)
        overwrite(t)
        torch_xla.sync()
        assert t.cpu().tolist() == [0.0] * 8
        assert torch.equal(new.cpu(), values(8) + 1)


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@in_process(devices=4)
def test_a_sharded_argument_that_is_returned_is_kept():
    for options in BACKENDS.values():
        for spec in (None, (("a", "b"),)):
            torch._dynamo.reset()
            g = compile(lambda s: {"p": s["p"], "t": s["t"] * 2, "q": s["q"] + 1}, donate_argnums=0, **options)
            for other in (lambda w: w, torch.Tensor.detach, lambda w: w.data):
                w, q = make((8,), spec), make((8,), spec)
                result = g({"p": w, "t": other(w), "q": q})
                torch_xla.sync()
                found = [result[key].cpu() for key in "ptq"]
                expected = [values(8), values(8) * 2, values(8) + 1]
                assert all(map(torch.equal, found, expected)), (options, spec)
                assert is_donated(q) and not is_donated(w)
                assert torch.equal(w.cpu(), values(8))


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@in_process(devices=4)
def test_a_wrapper_counts_as_the_tensor_in_it():
    rows, wrap = (("a", "b"), ()), xs.wrap_if_sharded
    for options in ({}, {"pure": True}):
        x = make((8, 4), rows)
        kept, double = compile(lambda s: (wrap(s), s * 2), donate_argnums=0, **options)(x)
        torch_xla.sync()
        assert torch.equal(torch.as_tensor(_host.without_wrapper(kept).cpu()), values(8, 4)) and not is_donated(x)
        for first in (x, wrap(x)):
            message = error_of(ValueError, compile(lambda a, b: a * 2 + b, donate_argnums=0, **options), first, wrap(x))
            assert "has the same buffer" in message and not is_donated(x)
    c = wrap(make((8, 4), rows))
    for f in (lambda s: shard(s * 2, rows), lambda s: s + c, lambda s: wrap(s) * 2):
        for argument in (make((8, 4), rows), wrap(make((8, 4), rows))):
            (donor,) = compile(f, donate_argnums=0).lower(argument).compile().donors
            assert donor.output == (0,)
    g = compile(lambda s: s + c, donate_argnums=0, pure=True)
    for k in (1, 2):
        assert torch.equal(g(make((8, 4), rows) * k).cpu(), values(8, 4) * (k + 1))
    big = wrap(make((64, 64), rows))
    (hint,) = advise(lambda w: w * 2, big)
    assert hint.bytes == 4096 and "donate_argnums=(0,)" in hint.edit
    assert not donation_report().errors


@pytest.mark.filterwarnings("ignore::torch_xla_donate.DonationWarning")
@pytest.mark.parametrize("donated", [(), (0,)])
@in_process(devices=4)
def test_a_backward_graph_of_torch_compile_takes_the_results_of_the_last_call(donated):
    def step(state, x):
        leaves = {name: value.detach().requires_grad_() for name, value in state.items()}
        loss = torch.tanh(x @ leaves["w"] + leaves["b"]).pow(2).mean()
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
        return {name: state[name] - 0.5 * gradients[name] for name in state}

    g = compile(step, donate_argnums=donated, backend="openxla")
    state = {"w": make((8, 16)) / 512, "b": make((16,)) / 512}  # tanh of larger values has no gradient
    expected = {name: value.cpu() for name, value in state.items()}
    for i in range(3):
        x = make((8, 8)) / (64 + i)
        state, expected = g(state, x), step(expected, x.cpu())
    assert all(torch.allclose(state[name].cpu(), expected[name], atol=1e-5) for name in state)


@in_process(devices=4)
def test_a_pair_of_sharded_tensors_is_kept():
    spec = (("a", "b"),)
    a, b = make((8,), spec), make((8,), spec)
    x, y = shard(a + 1, spec), shard(b + 2, spec)
    donate_buffer([a, b], into=[y, x])
    torch_xla.sync(wait=True)
    assert [donor.into_kept for donor in donation_report(steps=1).donors] == [True, True]
    assert torch.equal(x.cpu(), values(8) + 1) and torch.equal(y.cpu(), values(8) + 2)
