"""What tests of all folders share: tensors and their pointers, a fresh interpreter, the backends of `compile`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parents[1]


class Couple:
    """A pytree that is registered as most are: without keys for its leaves. It takes only tensors."""

    def __init__(self, first, second):
        if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
            raise TypeError("a Couple takes tensors")
        self.first, self.second = first, second


pytree.register_pytree_node(Couple, lambda c: ([c.first, c.second], None), lambda leaves, _: Couple(*leaves))


def run_script(source: str, *args: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python source in a fresh process on XLA's CPU backend; returns its output as text.

    The source is dedented and run from a file `script.py`, so that tracebacks and warnings have
    lines; `args` are its arguments. `env` is added to this process's environment, of which
    XLA_FLAGS is not passed on. Fails the test with stdout and stderr if the exit code is not 0, or
    after 300 seconds.
    """
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment.update({"PJRT_DEVICE": "CPU", **(env or {})})
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(textwrap.dedent(source), encoding="utf-8")
        child = subprocess.Popen(
            [sys.executable, str(script), *args],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Its own group, so that a timeout ends the processes it started, too.
            start_new_session=True,
        )
        try:
            stdout, stderr = child.communicate(timeout=300)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)
            stdout, stderr = child.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            pytest.fail(f"still running after {error.timeout:g} s\n{_shown(stdout, stderr)}")
    if child.returncode != 0:
        pytest.fail(f"found exit code {child.returncode}, expected 0\n{_shown(stdout, stderr)}")
    return subprocess.CompletedProcess(child.args, child.returncode, stdout, stderr)


def _shown(stdout: str, stderr: str) -> str:
    return f"--- stdout\n{stdout}\n--- stderr\n{stderr}"


def run_in_a_fork(function: Callable[..., object], *args: object) -> int:
    """Calls a function in a fork of this process; the exit code: 1 if it raises or returns False."""
    sys.stdout.flush()
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        code = int(function(*args) is False)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_from(folder: str, name: str) -> ModuleType:
    """A module of a folder of this repository that is no package, such as examples."""
    sys.path.insert(0, str(ROOT / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / folder))


def console(command: str, output: str) -> str:
    """The block of a page that shows a command and its output. Blanks at the ends of lines do not count."""
    printed = "\n".join(line.rstrip() for line in output.splitlines())
    return f"```console\n$ {command}\n{printed}\n```"


#: A program that donates a tensor, for processes that run under other circumstances.
DONATING_PROGRAM = """
import torch, torch_xla
import torch_xla_donate as txd

old = torch.ones(4).to("xla")
txd.donate_buffer(old)
new = old + 1
torch_xla.sync(wait=True)
assert txd.is_donated(old) and new.tolist() == [2.0] * 4
print("DONATED")
"""

#: The options of `compile` for each of its backends.
BACKENDS: dict[str, dict[str, Any]] = {"lazy": {}, "pure": {"pure": True}, "openxla": {"backend": "openxla"}}

#: For files whose donors need not be usable: nobody has to be told of those that were not.
UNUSABLE_IGNORED = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.usefixtures("notices_taken")]

each_trace = pytest.mark.parametrize("options", [BACKENDS["pure"], BACKENDS["openxla"]], ids=["pure", "openxla"])


def lacking(release: str, reason: str, *, run: bool = True) -> pytest.MarkDecorator:
    """Marks a test of what a release of torch and torch_xla lacks by itself: there it has to fail.

    Args:
        release: such as ``2.8``.
        reason: what the release does, and upstream's change, so that a reader can tell it from a defect of ours.
        run: False if the test ends the process.
    """
    is_here = torch.__version__.startswith(f"{release}.")
    return pytest.mark.xfail(is_here, reason=f"torch_xla {release}: {reason}", strict=True, run=run)


spmd_scan_gradients = lacking(
    "2.8", "XLA refuses the backward pass of a scan under SPMD, as its shard_alike has no sharding"
)
HAS_JAX = sys.version_info >= (3, 11)
needs_jax = pytest.mark.skipif(not HAS_JAX, reason="jax 0.7.1 needs Python 3.11")


def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A materialised XLA tensor: 0, 1, 2, ... in the shape given."""
    import torch_xla

    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape).to("xla")
    torch_xla.sync(wait=True)
    return tensor


def pointer(tensor: torch.Tensor) -> int:
    """The address of an XLA tensor's memory, once it has been computed."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()
    return int(torch_xla._XLAC._unsafe_buffer_pointer(tensor))


def consume(donor: Any, function: Callable[[Any], Any] = lambda t: t + 1, *, wait: bool = False) -> Any:
    """A step that donates a tensor, or a pytree of them, and computes a function of it, which it returns.

    The mark comes before the function's first operation, and has the line of the caller.
    """
    import torch_xla

    from torch_xla_donate import donate_buffer, is_donated

    donate_buffer(donor, stacklevel=2)
    result = function(donor)
    torch_xla.sync(wait=wait)
    assert all(map(is_donated, pytree.tree_leaves(donor)))
    return result


def assert_a_step_donates() -> None:
    """A fresh tensor is marked, and its step donates it and computes what it should."""
    assert consume(make(8), wait=True).tolist() == list(range(1, 9))


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Inside, garbage is collected only where the program asks for it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def lose(donor: torch.Tensor, **options: Any) -> torch.Tensor:
    """A step that reads a donor and has no output for it. Returns the donor's sum."""
    import torch_xla

    from torch_xla_donate import donate_buffer

    donate_buffer(donor, **options)
    total = donor.sum()
    torch_xla.sync(wait=True)
    return total


def compiles() -> int:
    """How many graphs torch_xla has compiled in this process."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


def assert_keeps_nothing(g: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """A compiled function of two arrays of 10 numbers lets go of its arguments, and 2,000 calls leave no trace."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    from torch_xla_donate import _C

    x, y, one = make(10), make(10), make(10)
    gone = [weakref.ref(x), weakref.ref(y)]
    result = g(x, y)
    del x, y
    gc.collect()
    assert [reference() for reference in gone] == [None, None]

    def alive():
        gc.collect()
        xm.wait_device_ops()
        return metrics.counter_value("CreateXlaTensor") - metrics.counter_value("DestroyXlaTensor")

    for _ in range(10):
        result = g(result, one)
    before, sizes = alive(), _C.sizes()
    for _ in range(2000):
        result = g(result, one)
    assert alive() == before
    assert all(count <= sizes[name] + 2 * 64 for name, count in _C.sizes().items())


#: The test runs once for each backend, with the options of `compile` as `options`.
each_backend = pytest.mark.parametrize("options", BACKENDS.values(), ids=BACKENDS)


def whole_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor that shares the buffer."""
    import torch_xla

    copy = torch.empty_like(tensor)
    copy.copy_(tensor)
    torch_xla.sync(wait=True)
    assert pointer(copy) == pointer(tensor)
    return copy


def error_of(kind: type[Exception], function: Callable[..., object], *args: object, **kwargs: object) -> str:
    """The message of the error of this kind that a call raises, and nothing if it raises none."""
    try:
        function(*args, **kwargs)
    except kind as error:
        return str(error)
    return ""


def last_reasons() -> list[str]:
    """Why each donor of the last step was not used; empty for one that was."""
    from torch_xla_donate import donation_report

    return [donor.reason for donor in donation_report(steps=1).donors]


def model_of(width: int = 4) -> torch.nn.Module:
    """A linear model on the device with one output."""
    torch.manual_seed(0)
    return torch.nn.Linear(width, 1).to("xla")


def loops_with_and_without_donation(rank: int) -> None:
    """For `torch_xla.launch`: a loop with a cache and kept tensors computes the same with automatic donation."""
    import torch_xla

    from torch_xla_donate import auto_donate

    def loop():
        places = set()
        p, m, cache, kept, seen = (torch.arange(6.0) + rank).to("xla"), torch.zeros(6).to("xla"), None, [], []
        for i in range(30):
            m = 0.9 * m + p * 0.1
            p = p - 0.1 * m
            cache = torch.zeros(4, 6).to("xla") if cache is None else cache
            cache[i % 4] = p
            if i % 5 == 0:
                kept.append(p)
            torch_xla.sync(wait=bool(i % 2))
            places.add(pointer(cache))
            if i % 7 == 0:
                seen.append(p.sum().item())
        return (p.tolist(), cache.tolist(), [k.tolist() for k in kept], seen), len(places)

    without, _ = loop()
    with auto_donate():
        found, places = loop()
    assert found == without
    sys.stdout.write(f"{rank} {places}\n")  # in one piece, as several threads write
