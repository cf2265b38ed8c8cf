"""Advice for whole programs: each hint's line and bytes, and the bytes that the edit saves."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import runpy
from pathlib import Path

import pytest
import torch
import torch_xla
from children import in_process, run_file, run_in_child
from sharding import mesh, shard
from watching import repeated, watching

from torch_xla_donate import auto_donate, donation_report, hlo
from torch_xla_donate._tools.hints import Advice, Hint

# Autograd's threads may hold a gradient when a step begins, and so make it an output.
IMPORTS = """import torch
import torch_xla

torch.autograd.set_multithreading_enabled(False)
torch.manual_seed(0)
"""
SIZE = 64 * 64 * 4  # bytes of the arrays below

SLICES = """
cache = torch.zeros(64, 64).to("xla")
torch_xla.sync()
for i in range(6):
    cache[i] = cache.sum(0) + i  # here
    torch_xla.sync()
print(cache.sum().item())
"""
MODULE_CACHE = """
class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(64, 64))

    def forward(self, x, i):
        self.keys[:, i] = x  # here
        return self.keys @ x

model = torch.nn.Sequential(Attention()).to("xla")
x = torch.ones(64).to("xla")
with torch.no_grad():
    for i in range(6):
        y = model[0](x, i)
        torch_xla.sync()
print(y.sum().item())
"""
REASSIGNED = """
x = torch.ones(64, 64).to("xla")
for i in range(6):
    x = torch.tanh(x * 0.9)  # here
    torch_xla.sync()
print(x.sum().item())
"""
KEPT_AT_TIMES = """
kept = []
x = torch.ones(64, 64).to("xla")
for i in range(7):
    if i == 5:
        kept.append(x)
    x = x * 0.9  # here
    torch_xla.sync()
print(x.sum().item(), kept[0].sum().item())
"""
FUNCTIONAL = """
params = {name: torch.ones(64, 64).to("xla") for name in "ab"}

def update(params):
    return {name: p - 0.1 * p.tanh() for name, p in params.items()}

for i in range(6):
    params = update(params)  # here
    torch_xla.sync()
print(params["a"].sum().item())
"""
LOSS = """
p = torch.ones(64, 64).to("xla")
for i in range(6):
    p.requires_grad_()
    loss = (p * p).sum()  # here
    (gradient,) = torch.autograd.grad(loss, [p])
    p = (p - 0.1 * gradient).detach()
    del gradient
    torch_xla.sync()
print(p.sum().item(), loss.item())
"""
GRADIENTS = """
model = torch.nn.Linear(64, 64, bias=False).to("xla")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.ones(8, 64).to("xla")
for i in range(6):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
print(loss.item())
"""
LOST = """
layer = torch.nn.Linear(64, 64, bias=False).to("xla")
for i in range(6):
    layer.weight.data = layer.weight.data * 0.9  # here
    torch_xla.sync()
print(layer.weight.sum().item())
"""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program's advice, what it printed, and bytes of its largest step."""

    advice: Advice
    printed: str
    aliased: int


def watch(file: str) -> tuple[str, str]:
    """In a child: the advice for a program as JSON, and what the program printed."""
    with watching() as recorder, contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(file, run_name="__main__")
    return json.dumps(repeated(recorder).to_dict()), printed.getvalue()


def measure(file: Path, env: dict[str, str] | None = None) -> Measured:
    folder = file.with_name(f"dump_{len(list(file.parent.glob('dump_*')))}")
    advice, printed = run_in_child(watch, str(file), dump=folder, env=env).value
    steps = [module.after for module in hlo.read_dump(folder) if module.after is not None]
    step = max(steps, key=lambda module: module.result.bytes + sum(p.bytes for p in module.parameters))
    hints = json.loads(advice)["hints"]
    found = Advice(Hint(**{field.name: raw[field.name] for field in dataclasses.fields(Hint)}) for raw in hints)
    return Measured(found, printed, step.aliased_bytes)


def written(tmp_path: Path, source: str) -> Path:
    file = tmp_path / "train.py"
    file.write_text(IMPORTS + source, encoding="utf-8")
    return file


def line_of(source: str) -> int:
    return (IMPORTS + source)[: (IMPORTS + source).index("# here")].count("\n") + 1


def only(advice: Advice) -> Hint:
    (hint,) = advice
    return hint


def assert_saves(before: Measured, edited: Path) -> None:
    """The program prints the same after the edit of its only hint, and its aliases grow by the hint's bytes."""
    after = measure(edited)
    assert after.printed == before.printed
    assert after.aliased == before.aliased + only(before.advice).bytes
    assert not after.advice


DONATED = {
    "slices": (SLICES, "slice_assignment", "cache", 1),
    "module_cache": (MODULE_CACHE, "slice_assignment", "model.0.keys", 1),
    "reassigned": (REASSIGNED, "reassignment", "x", 1),
    "kept_at_times": (KEPT_AT_TIMES, "reassignment", "x", 1),
    "functional": (FUNCTIONAL, "functional_update", "params", 2),
    "loss": (LOSS, "kept_graph", "p", 1),
    "lost": (LOST, "lost_alias", "layer.weight", 1),
}


AUTO = "import torch_xla_donate\ntorch_xla_donate.set_auto_donate(True)\n"
DETACHED = LOSS.replace("    torch_xla.sync()", "    loss = loss.detach()\n    torch_xla.sync()")


def graphs(folder: Path) -> list[object]:
    return [(m.before.parameters, m.before.result, m.donors, m.aliases) for m in hlo.read_dump(folder) if m.before]


@pytest.mark.parametrize("case", DONATED)
def test_the_call_of_a_hint_donates_its_bytes(tmp_path: Path, case: str) -> None:
    """And watching changes neither values nor graphs."""
    source, kind, name, count = DONATED[case]
    file, plain = written(tmp_path, source), tmp_path / "plain"
    before = measure(file)
    assert run_file(file, dump=plain).stdout == before.printed
    assert graphs(plain) == graphs(tmp_path / "dump_0")
    hint = only(before.advice)
    assert (hint.kind, hint.name, hint.bytes, hint.array) == (kind, name, count * SIZE, "f32[64,64]")
    assert hint.where == f"{file}:{line_of(source)}"
    assert hint.runs >= 2 and "set_auto_donate(True)" in hint.edit
    assert_saves(before, written(tmp_path, AUTO + (DETACHED if case == "loss" else source)))


def test_a_write_in_another_file_is_found(tmp_path: Path) -> None:
    """The hooks see its line, also if the file has changed since."""
    (tmp_path / "lib").mkdir()
    cache = tmp_path / "lib" / "cache.py"
    cache.write_text("def put(cache, i):\n    open(__file__, 'w').write('')\n    cache[i] = i\n", encoding="utf-8")
    head = f"import sys\nsys.path.insert(0, {str(cache.parent)!r})\nimport cache as lib\n"
    source = SLICES.replace("cache[i] = cache.sum(0) + i", "lib.put(cache, i)")
    assert only(measure(written(tmp_path, head + source)).advice).where == f"{cache}:3"


def test_a_kept_graph_under_auto_donate_needs_only_the_detach(tmp_path: Path) -> None:
    before = measure(written(tmp_path, AUTO + LOSS))
    hint = only(before.advice)
    assert (hint.kind, hint.edit) == ("kept_graph", "loss = loss.detach() before the step ends")
    assert_saves(before, written(tmp_path, AUTO + DETACHED))


def test_a_setting_that_loses_in_place_updates(tmp_path: Path) -> None:
    file = written(tmp_path, GRADIENTS)
    before = measure(file, {"XLA_ENABLE_PARAM_ALIASING": "0"})
    hint = only(before.advice)
    assert hint.kind == "lost_alias"
    assert "XLA_ENABLE_PARAM_ALIASING=0" in hint.edit
    assert before.aliased == 0
    assert hint.bytes >= 3 * SIZE
    assert_saves(before, file)


# Updates in place, and programs with `auto_donate`, are in the tests above.
WELL_WRITTEN = {
    "marked": REASSIGNED.replace("    x = ", "    torch_xla_donate.donate_buffer(x)\n    x = ").replace(
        "\nx", "import torch_xla_donate\nx", 1
    ),
    "compiled": f"import torch_xla_donate\n{FUNCTIONAL}".replace(
        "\nfor", "\nupdate = torch_xla_donate.compile(update, donate_argnums=0)\nfor"
    ),
    "inference": """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).to("xla")
x = torch.ones(64, 64).to("xla")
with torch.no_grad():
    for i in range(6):
        y = model(x)
        torch_xla.sync()
print(y.sum().item())
""",
    "accumulated gradients": """
w = torch.ones(64, 64).to("xla").requires_grad_()
for i in range(6):
    ((w * i) ** 2).sum().backward()
    torch_xla.sync()
print(w.grad.sum().item())
""",
    "average in place": """
w, average = torch.ones(64, 64).to("xla"), torch.zeros(64, 64).to("xla")
for i in range(6):
    w.mul_(0.9)
    average.lerp_(w, 0.1)
    torch_xla.sync()
print(average.sum().item())
""",
}


@pytest.mark.parametrize("case", WELL_WRITTEN)
def test_a_well_written_program_gets_no_hint(tmp_path: Path, case: str) -> None:
    found = measure(written(tmp_path, WELL_WRITTEN[case]))
    assert found.advice == Advice()


@in_process(devices=4)
def test_an_output_with_another_sharding():
    """The hint's edit shards the output like the input; then `auto_donate` donates the hint's bytes."""
    mesh()

    def loop(*spec):
        kept = []
        for _ in range(4):
            x = shard(torch.ones(64, 64).to("xla"), "x", None)
            torch_xla.sync()
            kept[:] = [shard(x * 2, *spec)]
            del x
            torch_xla.sync()
        return kept[0].sum().item()

    with watching() as recorder:
        before = loop(None, None)
    hint = only(repeated(recorder))
    assert (hint.kind, hint.bytes, hint.array) == ("output_sharding", SIZE // 4, "f32[64,64]")
    assert "{devices=[4,1]0,1,2,3}" in hint.edit
    with auto_donate():
        assert loop("x", None) == before
    (donor,) = donation_report(steps=1).donors
    assert (donor.outcome, donor.bytes_per_device) == ("donated", hint.bytes)
