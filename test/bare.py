"""Programs for children that import this package late, or not at all: this module does not import it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator

import torch
import torch_xla
import torch_xla.runtime as xr
from helpers import consume
from torch_xla import _XLAC
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan import scan


def import_package(folder: str | None = None) -> None:
    """The package, or its copy in a folder."""
    assert "torch_xla_donate" not in sys.modules
    if folder is not None:
        sys.path.insert(0, folder)
    importlib.import_module("torch_xla_donate")


def train_three_steps(package: bool) -> None:
    """AdamW on a small net, with or without the package imported; nothing is marked."""
    assert "torch_xla_donate" not in sys.modules
    if package:
        importlib.import_module("torch_xla_donate")
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to("xla")
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(3, 4, device="xla")).sum().backward()
        optimizer.step()
        torch_xla.sync(wait=True)


def mappings(library: str) -> list[str]:
    """The lines of this process's map for a file whose path ends so."""
    with open("/proc/self/maps") as maps:
        return [line for line in maps if line.rstrip().endswith(library)]


def mapped(library: str, *accesses: str) -> Iterator[tuple[int, bytes]]:
    """The address and the bytes of each mapping of a library with such an access."""
    with open("/proc/self/mem", "rb", 0) as memory:
        for place, access, *_ in map(str.split, mappings(library)):
            if access in accesses:
                first, last = (int(part, 16) for part in place.split("-"))
                memory.seek(first)
                yield first, memory.read(last - first)


def state() -> tuple[str, list[str]]:
    """The read-only data of torch_xla's module (its relocation slots are there), and how its pages are protected."""
    digest, lines = hashlib.sha256(), mappings(_XLAC.__file__)
    for _, data in mapped(_XLAC.__file__, "r--p"):
        digest.update(data)
    assert lines
    return digest.hexdigest(), lines


def import_switched_off(version: str) -> list[str]:
    """Imports the package in a process where nothing may change. Returns its warnings. version: torch_xla's."""
    assert "torch_xla_donate" not in sys.modules
    before, torch.__version__ = state(), version
    importlib.metadata.version = lambda package: version
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        txd = importlib.import_module("torch_xla_donate")
    old = torch.ones(4, device="xla")
    torch_xla.sync()
    new = old + 1
    with txd.donate_buffer(old), txd.auto_donate():
        torch_xla.sync(wait=True)
    assert (old.tolist(), new.tolist()) == ([1.0] * 4, [2.0] * 4)
    with open("/proc/self/maps") as maps:
        assert not [line for line in maps if "/_C." in line and "torch_xla_donate" in line]
    assert "torch_xla_donate._C" not in sys.modules and state() == before
    return [f"{warning.category.__name__}: {warning.message}" for warning in found]


def pages() -> tuple[dict[str, str], dict[str, str]]:
    """Of each library that is mapped: its read-only data that differ from the file, and how much of its code does."""
    data: dict[str, str] = {}
    code: dict[str, str] = {}
    name, access, first, last = "", "", 0, 0
    with open("/proc/self/smaps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            if "-" in (fields := line.split())[0]:
                name, access = (fields[5] if len(fields) == 6 else ""), fields[1]
                first, last = (int(part, 16) for part in fields[0].split("-"))
            elif fields[0] == "Anonymous:" and ".so" in name and int(fields[1]):
                if access == "r-xp":
                    code[name] = fields[1]
                elif access == "r--p":
                    memory.seek(first)
                    data[f"{name} {first:x}"] = hashlib.sha256(memory.read(last - first)).hexdigest()
    return data, code


def changed_by_the_import() -> tuple[list[str], list[str]]:
    """The libraries whose read-only data the import and a donating step change, and those whose code they change."""
    old = torch.ones(4, device="xla")
    torch_xla.sync(wait=True)
    data, code = pages()
    assert len(data) > 10
    importlib.import_module("torch_xla_donate")
    assert consume(old, wait=True).tolist() == [2.0] * 4
    new_data, new_code = pages()
    changed = {key.split()[0] for key, found in data.items() if new_data[key] != found}
    return sorted(name.rpartition("/")[2] for name in changed), [name for name in code if new_code[name] != code[name]]


def hooks_come_and_go() -> None:
    """torch_xla's module before the package is imported, with the hooks in place, and with the hooks out again."""
    assert "torch_xla_donate" not in sys.modules
    before = state()
    _host = importlib.import_module("torch_xla_donate")._host
    patched = state()
    assert patched[0] != before[0] and patched[1] == before[1]
    _host.install_hooks()
    assert state() == patched
    for _ in range(3):
        _host.uninstall_hooks()
        assert state() == before
    _host.install_hooks()
    assert state() == patched


def write_through_views(package: bool) -> list[list[list[float]]]:
    """Tensors after steps that write through views; nothing is marked."""
    assert "torch_xla_donate" not in sys.modules
    if package:
        importlib.import_module("torch_xla_donate")
    cache, other, key = torch.zeros(5, 4).to("xla"), torch.zeros(5, 4).to("xla"), torch.ones(4).to("xla")
    torch_xla.sync(wait=True)
    for i in range(2):
        cache[i] = key
        other.data[i] = key
        row = other[0]
        row.t().add_(1)
        torch_xla.sync(wait=True)
    with torch.inference_mode():
        third = torch.zeros(5, 4).to("xla")
        third[3] += key
        view = third.t()
        torch_xla.sync(wait=True)
    return [t.tolist() for t in (cache, other, third, view)]


def read_dynamic_size(package: bool) -> tuple[str, bool]:
    """The error of an operation on a tensor of dynamic size, and whether this package was imported."""
    assert "torch_xla_donate" not in sys.modules
    if package:
        importlib.import_module("torch_xla_donate")
    t = torch.tensor([0.0, 1.0, 2.0]).to("xla")
    found = torch.masked_select(t, t > 0.5)
    torch_xla.sync(wait=True)
    try:
        found * 2
    except RuntimeError as error:
        return str(error), "torch_xla_donate" in sys.modules
    raise AssertionError("no error")


def accumulate_slices(package: bool) -> tuple[float, list[float]]:
    """Under SPMD, two iterations that scan and have a backward pass: the loss, and a gradient of each row."""
    assert "torch_xla_donate" not in sys.modules
    accumulate, loop = gradient_accumulation, scan
    if package:
        txd = importlib.import_module("torch_xla_donate")
        accumulate, loop = txd.gradient_accumulation, txd.scan
    xr.use_spmd()
    start = {"rows": torch.arange(28.0).reshape(7, 4), "factors": torch.full((3, 4), 2.0)}
    model = torch.nn.ParameterDict(start).to("xla")
    tokens = torch.tensor([[[0, 1, 2, 3, 4]], [[2, 3, 4, 5, 6]]]).to("xla")
    torch_xla.sync(wait=True)

    def step(batch: torch.Tensor) -> torch.Tensor:
        rows = model["rows"][batch[:, :-1]]
        return loop(lambda carry, x: (carry * x, None), rows, model["factors"])[0].sum()

    loss = accumulate(step, (tokens,), model)
    torch_xla.sync(wait=True)
    return loss.item(), model["rows"].grad[:, 0].tolist()


def donate_in_steps() -> None:
    """A step with a donor of each dtype, which torch_xla itself marks. One of them has no output of its bytes."""
    device = torch_xla.device()
    names = ["float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "complex64"]
    every = [torch.ones(3, 5, dtype=getattr(torch, name)).to(device) for name in names]
    flags = torch.ones(3, 5, dtype=torch.bool).to(device)
    small = torch.ones(3, 5).to(torch.float8_e4m3fn).to(device)
    torch_xla.sync()
    assert all(_XLAC._set_buffer_donation(t, True) for t in (*every, flags, small))
    _outputs = [t + t for t in every] + [flags.logical_not(), small.to(torch.float32)]
    torch_xla.sync(wait=True)


def graphs_of_other_wiring() -> list[float]:
    """Three steps of one program, whose last operation reads the second input, then the first, then the second."""
    assert "torch_xla_donate" not in sys.modules
    results = []
    for last in (1, 0, 1):
        inputs = [torch.full((3, 3), value).to("xla") for value in (3.0, 5.0)]
        torch_xla.sync()
        _other, result = inputs[0] + inputs[0], inputs[1] - 2 * inputs[last]
        torch_xla.sync()
        results.append(result.cpu()[0, 0].item())
    return results
