"""Arguments on another device than the thread's current one, in one process with four devices."""

from __future__ import annotations

import pytest
import torch
import torch_xla
from children import in_process
from helpers import BACKENDS
from torch_xla import _XLAC

import torch_xla_donate
from torch_xla_donate import _C, debug_nans, donation_report, is_donated, scan

ANY = pytest.mark.parametrize("backend", BACKENDS)
GRAPHS = pytest.mark.parametrize("backend", ["pure", "openxla"])


def on(device, *values):
    return torch.tensor([*map(float, values)]).to(f"xla:{device}")


def compiled(f, backend, **options):
    return torch_xla_donate.compile(f, **BACKENDS[backend], **options)


@ANY
@in_process(devices=4)
def test_a_function_runs_on_the_device_of_its_arguments(backend):
    """The current device stays, also after an error."""
    step = compiled(lambda x, y: x * 2 + y, backend, donate_argnums=0)
    for device in (3, 0, 3, 1):
        x = on(device, 1, 2)
        result = step(x, on(device, 3, 4))
        assert (result.tolist(), str(result.device), is_donated(x)) == ([5, 8], f"xla:{device}", True)
        assert _XLAC._xla_get_default_device() == "xla:0"
    assert donation_report().reused_fraction == 1.0
    assert compiled(lambda x: x + 1, backend)(on(2, 1) * 2).tolist() == [3]

    def fail(x):
        raise KeyError

    with pytest.raises(KeyError):
        compiled(fail, backend, donate_argnums=0)(on(3, 1))
    assert (_XLAC._xla_get_default_device(), _C.pending()) == ("xla:0", [])


@ANY
@in_process(devices=4)
def test_aliases_and_pending_readers_are_found_on_that_device(backend):
    x = on(3, 1, 2)
    kept = torch.empty_like(x)
    kept.copy_(x)
    torch_xla.device(3)
    torch_xla.sync(wait=True)  # both have one buffer
    torch_xla.device(0)
    later = x * 5
    result = compiled(lambda x: x + 1, backend, donate_argnums=0, strict="off")(x)
    assert [result.tolist(), later.tolist(), kept.tolist()] == [[2, 3], [5, 10], [1, 2]]


@GRAPHS
@in_process(devices=4)
def test_tensors_on_two_devices_are_refused(backend):
    x, y = on(0, 1), on(3, 1)
    step = compiled(lambda x, y: (x + 1, y + 1), backend, donate_argnums=0)
    with pytest.raises(ValueError, match=r"one device, but x \(argument 0 .*\) is on xla:0, and y \(.*\) is on xla:3"):
        step(x, y)
    torch_xla.sync()
    with pytest.raises(ValueError, match=r"on xla:0|xla:3 and xla:0"):
        compiled(lambda y: (x + 1, y + 1), backend)(y)
    with pytest.raises(ValueError, match="init and xs have tensors on xla:3 and xla:0"):
        scan(lambda carry, item: (carry + item, carry), y, x)
    assert (_C.pending(), x.tolist(), y.tolist()) == ([], [1], [1])
    assert [result.tolist() for result in compiled(lambda x, y: (x + 1, y + 1), "lazy")(x, y)] == [[2], [2]]


@GRAPHS
@in_process(devices=4)
def test_gradients_and_checks_run_on_that_device(backend):
    weight = torch.ones(2, 2, device="xla:3", requires_grad=True)
    step = compiled(lambda x, w: torch.autograd.grad((x @ w).sum(), w)[0], backend)
    assert step(torch.ones(1, 2, device="xla:3"), weight).tolist() == [[1, 1], [1, 1]]
    with debug_nans(), pytest.raises(FloatingPointError, match="1 NaN of 1 value"):
        compiled(lambda x: x / 0 - x / 0, backend)(on(3, 1))


@in_process(devices=4)
def test_without_arguments_the_current_device_runs_the_graph():
    step = compiled(lambda: torch.ones(2, device="xla") + 1, "pure")
    for device in (0, 2, 0):
        torch_xla.device(device)
        assert (step().tolist(), str(step().device)) == ([2, 2], f"xla:{device}")
    weight = on(3, 1)
    with pytest.raises(ValueError, match=r"runs on xla:0, but it computes or reads float32\[1\] on xla:3"):
        compiled(lambda: weight * 2, "pure")()


@in_process(devices=4)
def test_a_scan_and_an_executable_run_on_the_device_of_their_arguments():
    carry, _ = scan(lambda carry, item: (carry + item, carry * 1), on(3, 1), torch.ones(4, 1, device="xla:3"))
    assert (carry.tolist(), str(carry.device)) == ([5], "xla:3")
    executable = compiled(lambda x: x + 1, "lazy", donate_argnums=0).lower(on(3, 1)).compile()
    x = on(3, 1)
    result = executable(x)
    assert (result.tolist(), str(result.device), is_donated(x)) == ([2], "xla:3", True)
    assert executable.memory_analysis().alias_bytes == 4
