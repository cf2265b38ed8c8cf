"""Whether the examples read the same bits from the device with and without donation.

Each example runs in a separate process for each way: as it is written, with automatic donation, and with donation
disabled. After each step the tensors of the variables of the function that called `torch_xla.sync()` are compared, by
their names. Those that one of the ways has donated are left out.

A run replaces the rows of its release of torch_xla in the result file, and keeps those of other releases: `make bits`
runs it on each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch_xla
from torch.utils import _pytree as pytree

EXAMPLES = _common.FOLDER.parent / "examples"
# With the options that make a run short. `checkpoint.py` saves another state if nothing is donated, `kv_cache.py` and
# `huggingface.py` compare the ways in child processes, `llama.py` only compiles, `jax_quickstart.py` asserts donations.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "quickstart": (),
    "ema_and_gan": ("--donate", "--steps", "8", "--hidden", "64"),
    "loops": (),
    "spmd": (),
    "train_transformer": ("--donate", "--steps", "4", "--layers", "2", "--width", "64"),
    "train_digits": ("--mode", "donate", "--steps", "5", "--hidden", "128"),
    "user_computation": (),
}
WAYS = ("as written", "automatic")


def record(program: str, way: str, path: Path) -> None:
    """Runs an example, and writes a line for each tensor that its variables hold after each step."""
    import torch_xla_donate
    from torch_xla_donate import _C

    noted: dict[str, str] = {}
    steps = 0

    def note(name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module):
            value = [*value.parameters(), *value.buffers()]
        for index, leaf in enumerate(pytree.tree_leaves(value)):
            is_held = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.device.type == "xla"
            if is_held and not torch_xla_donate.is_donated(leaf):
                values = leaf.detach().cpu().contiguous()
                raw = bytes(values.view(-1).view(torch.uint8).tolist()) if values.numel() else b""
                noted[f"{steps} {name} {index}"] = f"{values.dtype} {hashlib.sha256(raw).hexdigest()}"

    step = torch_xla.sync

    def sync(*args: Any, **kwargs: Any) -> None:
        nonlocal steps
        step(*args, **kwargs)
        steps += 1
        frame = sys._getframe(1)
        # Not `f_locals`, which would keep tensors alive until the next step.
        for name, value in sorted(_C.frame_variables(frame).items()):
            if not name.startswith("_"):
                note(name, value)

    torch_xla.sync = sync
    torch.manual_seed(0)  # an example may draw its weights
    file = EXAMPLES / f"{program}.py"
    sys.argv, sys.path[0] = [str(file), *PROGRAMS[program]], str(EXAMPLES)
    mode = torch_xla_donate.donation_disabled() if way == "disabled" else contextlib.nullcontext()
    torch_xla_donate.set_auto_donate(way == "automatic")
    with mode, contextlib.suppress(SystemExit):
        runpy.run_path(str(file), run_name="__main__")
    path.write_text(json.dumps(noted), encoding="utf-8")


def values_of(program: str, way: str) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reads"
        command = [sys.executable, os.path.abspath(__file__), "--child", program, way, str(path)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if not path.exists():
            raise click.ClickException(f"{program} ({way}) failed:\n{done.stderr[-2000:]}")
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return found


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    rows = {(row["torch_xla"], row["example"]): row for row in result["rows"]}
    releases = sorted({release for release, _ in rows})

    def cell(release: str, example: str, way: str) -> str:
        found = rows.get((release, example))
        return f"{found[way]['different']} of {found[way]['tensors']}" if found is not None else "not run"

    return {
        "all": _common.Table(
            "example_bits: tensors after each step that differ from those with donation disabled",
            ("example", *(f"{release}, {way}" for release in releases for way in WAYS)),
            [
                (f"`{example}.py`", *(cell(release, example, way) for release in releases for way in WAYS))
                for example in dict.fromkeys(example for _, example in rows)
            ],
            _common.aim(result),
        )
    }


def other_releases(results: Path) -> list[dict[str, Any]]:
    """The rows that earlier runs wrote on other releases."""
    path = results / "example_bits.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return [row for row in rows if row["torch_xla"] != torch_xla.__version__]


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(PROGRAMS)), help="These examples; all by default.")
@click.option("--child", nargs=3, default=None, hidden=True)
@_common.tiny_option
@_common.results_option
def main(only: tuple[str, ...], child: tuple[str, str, str] | None, tiny: bool, results: Path) -> None:
    """Bits of the examples."""
    if child is not None:
        record(child[0], child[1], Path(child[2]))
        return
    rows = []
    for program in only or (["quickstart"] if tiny else PROGRAMS):
        plain = values_of(program, "disabled")
        row: dict[str, Any] = {"example": program, "torch_xla": torch_xla.__version__}
        for way in WAYS:
            found = values_of(program, way)
            common = plain.keys() & found.keys()
            row[way] = {"tensors": len(common), "different": sum(plain[key] != found[key] for key in common)}
        rows.append(row)
    result = _common.describe("example_bits", {"tiny": tiny})
    result["rows"] = other_releases(results) + rows
    met = all(row[way]["tensors"] and not row[way]["different"] for row in result["rows"] for way in WAYS)
    result["aim"] = {"text": "all bits are equal", "met": met}
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
