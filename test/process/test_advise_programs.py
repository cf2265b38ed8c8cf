"""Programs that are hard to edit print the same after the edits of their advice."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import traceback
from pathlib import Path

import pytest
import torch
from children import run_in_child

from torch_xla_donate import auto_donate
from torch_xla_donate._tools.edits import diff
from torch_xla_donate._tools.recorder import Recorder

IMPORTS = """import torch
import torch_xla

torch.autograd.set_multithreading_enabled(False)
torch.manual_seed(0)
"""
LOOP = """
x = torch.ones(64, 64).to("xla")
for i in range(8):
    x = x * 0.9
    torch_xla.sync()
print(x.sum().item())
"""
LOSS = """
p = torch.ones(64, 64).to("xla")
for i in range(6):
    p.requires_grad_()
    loss = (p * p).sum()
    (gradient,) = torch.autograd.grad(loss, [p])
    p = (p - 0.1 * gradient).detach()
    del gradient
    torch_xla.sync()
print(p.sum().item(), loss.item())
"""


def function(head: str = "def train():", source: str = LOOP) -> str:
    return f"{head}\n" + source.replace("\n", "\n    ").rstrip() + "\n"


STATE = """
import sys, types
other = torch.full((64, 64), 2.0).to("xla")
torch_xla.sync()
sys.modules["other_state"] = types.ModuleType("other_state")
sys.modules["other_state"].x = other
"""
KEPT = "print([k.sum().item() for k in kept])\n"
# Each with the edit that its patch has; empty for none of this kind.
MARKS = {
    "plain": (LOOP, "donate_buffer(x)"),
    "nested": (function("def train():") + "def outer():\n    return train\nouter()()\n", "donate_buffer(x)"),
    "decorated": (function("@torch.no_grad()\ndef train():") + "train()\n", ""),
    "async": (f"import asyncio\n{function('async def train():')}asyncio.run(train())\n", "donate_buffer(x)"),
    "thread": (
        f"import threading\n{function()}t = threading.Thread(target=train)\nt.start(); t.join()\n",
        "donate_buffer(x)",
    ),
    "tabs": (LOOP.replace("    ", "\t"), "donate_buffer(x)"),
    "several lines": (
        LOOP.replace("x * 0.9", "x \\\n      * 0.9  # here").replace("sync()", "sync(\n    )"),
        "donate_buffer(x)",
    ),
    "another letter": (LOOP.replace("x ", "ﬁ ").replace("x.", "fi."), "donate_buffer(ﬁ)"),
    "operands": (
        LOOP.replace("x * 0.9", "torch.where(x > s, x - lr * (x @ w), x)").replace(
            "for", "s, w = 0.5, 1\nlr = 0.1\ns = 0.5\nw = torch.randn(64, 64).to('xla')\nfor"
        ),
        "",
    ),
    "operands of the function": (
        LOOP.replace("x * 0.9", "x - lr * (x @ w)").replace("for", "lr = 0.01\nw = torch.randn(64, 64).to('xla')\nfor"),
        "donate_buffer(x)",
    ),
    "copies": (
        LOOP.replace("    x =", "    if i == 6:\n        kept += [x.clone(), torch.cat([x]), -x]\n    x =") + KEPT,
        "donate_buffer(x)",
    ),
    "semicolon": (LOOP.replace("* 0.9", "* 0.9; y = i"), ""),
    "inside a logical line": (LOOP.replace("    x =", "    y = 1; \\\n  x ="), ""),
    "case": (STATE + LOOP.replace("    x =", "    match [i, other]:\n        case [6, x]: pass\n    x ="), ""),
    "import": (STATE + LOOP.replace("    x =", "    if i == 6:\n        from other_state import x\n    x ="), ""),
    "walrus": (LOOP.replace("    x =", "    if i == 6 and (y := x) is not None: kept.append(y)\n    x =") + KEPT, ""),
    "a list": (LOOP.replace("    x =", "    kept = kept + [x] * (i == 6)\n    x =") + KEPT, ""),
    "frame": (
        "import sys\ndef peek():\n    kept.append(sys._getframe(1).f_locals['x'])\n"
        + function("def train():", LOOP.replace("    x =", "    if i == 6: peek()\n    x ="))
        + "train()\n"
        + KEPT,
        "",
    ),
    "gradients in some rounds": (
        LOOP.replace("0.9", "s")
        .replace("    x =", "    s = w if i > 5 else 0.9\n    x =")
        .replace("for", "w = torch.full((64, 64), 0.9).to('xla').requires_grad_()\ntorch_xla.sync()\nfor")
        + "x.sum().backward()\nprint(w.grad.sum().item())\n",
        "",
    ),
    "scalar": (
        LOOP.replace("torch.ones(64, 64)", "torch.tensor(1.0)").replace("0.9", "0.9 + torch.ones(64, 64).to('xla')"),
        "",
    ),
    "host scalar": (
        LOOP.replace('ones(64, 64).to("xla")', "tensor(1.0).to(torch.float32)").replace(
            "0.9", "0.9 + torch.ones(64, 64).to('xla')"
        ),
        "",
    ),
    "default device": ("torch.set_default_device('xla')" + LOOP + "torch.set_default_device('cpu')\n", ""),
    "device": (LOOP.replace("x = torch.ones", "with torch.device('xla'): x = torch.ones"), ""),
    "class": ("class Config:\n" + LOOP.replace("\n", "\n    "), ""),
    "else": (LOOP.replace("print", "else:\n    old = x\n    x = x + 1\n    torch_xla.sync()\nprint"), ""),
}
LOSSES = {
    "loss": (LOSS, "loss = loss.detach()"),
    "loss shown in the step": (LOSS.replace("    del", "    loss *= 2; print(loss)\n    del"), "loss = loss.detach()"),
    "loss shown": (f"{LOSS}print(loss, f'{{loss}}')\n", ""),
    "loss shown in the next round": (LOSS.replace("    p.req", "    if i: print(loss)\n    p.req"), ""),
    "loss updated later": (f"{LOSS}loss += 1\nprint(loss)\n", ""),
    "loss of None": (LOSS.replace("    del", "    if i == 5: loss = None\n    del").replace("loss.item()", "loss"), ""),
    "loss of a case": (
        LOSS.replace("    del", "    match i:\n        case 5 as loss: pass\n    del").replace("loss.item()", "loss"),
        "",
    ),
}


def printed(file: str) -> str:
    out = io.StringIO()
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(file, run_name="__main__")
    except Exception:
        out.write(traceback.format_exc())
    finally:
        auto_donate(False)
    return out.getvalue()


def watch(files: list[str]) -> list[tuple[bytes, str]]:
    """In a child: the diff for each program, and what it printed."""
    found = []
    for file in files:
        with Recorder() as recorder:
            shown = printed(file)
        text, left_out = diff(recorder.advice(), os.path.dirname(file))
        assert left_out == []
        found.append((text, shown))
    return found


def run(files: list[str]) -> list[str]:
    return [printed(file) for file in files]


@pytest.mark.parametrize(
    ("programs", "call"),
    [(MARKS, "donate_buffer("), (LOSSES, ".detach()")],
    ids=["marks", "losses"],
)
def test_programs_print_the_same_after_the_edits(
    tmp_path: Path, programs: dict[str, tuple[str, str]], call: str
) -> None:
    files = [tmp_path / name / "train.py" for name in programs]
    for file, (source, _) in zip(files, programs.values()):
        file.parent.mkdir()
        file.write_text(f"{IMPORTS}kept = []\n{source}", encoding="utf-8")
    before = run_in_child(watch, list(map(str, files))).value
    for file, (_, edit), (text, shown) in zip(files, programs.values(), before):
        assert "Traceback" not in shown, shown
        added = "".join(line for line in text.decode().splitlines() if line.startswith("+"))
        assert (edit in added, call in added) == (True, bool(edit)), (file.parent.name, added)
        if text:
            subprocess.run(["patch", "-s", "-p0"], cwd=file.parent, input=text, check=True)
    after = run_in_child(run, list(map(str, files))).value
    assert dict(zip(programs, after)) == {name: shown for name, (_, shown) in zip(programs, before)}
