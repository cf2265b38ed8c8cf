"""Decodes with a KV cache that is written by slice assignment: copied whole at every token, or donated, or index_copy_.

`cache[:, i] = k` makes a new cache. torch_xla does not alias it to the old one, so each token copies every cache,
however short the slice is. `donate_buffer(caches)` before the write lets XLA write the slice into the memory that is
there. `index_copy_` is aliased by torch_xla itself.

    python examples/kv_cache.py

The position of a slice is a Python number, so a part of the graph: each position is compiled once, when the first
sequence comes to it. Donation does not change that; `index_copy_` takes the position as a tensor, and is compiled once.
Speed is measured from the second sequence on, when nothing is compiled. A few positions of a long cache are enough.

The weights are random, and so is what is written; they are the same in each mode, and so must the bytes be. Bytes
copied are those of the `copy` operations of a cache's shape in the compiled step, as XLA's dump has them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from statistics import median

import click
import gpt
import torch
import torch_xla
from _show import planned_bytes, step_module
from _tpu import print_reuse
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch_xla.debug import metrics

from torch_xla_donate import donate_buffer, hlo

Caches = list[list[torch.Tensor]]  # of each layer keys and values, each [batch * heads, context, width / heads]
MODES = ("plain", "donate", "index_copy_")
MIB = 2**20


@torch.no_grad()
def decode(
    params: gpt.Tensors, caches: Caches, tokens: torch.Tensor, i: int, at: torch.Tensor, mode: str, size: gpt.Size
) -> torch.Tensor:
    """The next byte of each sequence [batch], after `tokens` [batch] at position `i`; `at` is `i` as a tensor [1]."""
    x = (params["embedding"][tokens] + params["positions"][at])[:, None]
    visible = torch.arange(size.context, device=x.device) <= at
    for layer, (keys, values) in enumerate(caches):
        block = {name: p[layer] for name, p in gpt.blocks_of(params).items()}
        q, k, v = gpt.split_heads(x, block, size.heads)
        if mode == "index_copy_":
            keys.index_copy_(1, at, k)
            values.index_copy_(1, at, v)
        else:
            keys[:, i] = k[:, 0]
            values[:, i] = v[:, 0]
        x = gpt.attended(x, block, q, keys, values, visible)
    logits = gpt.normalised(x[:, 0], params["norm"]) @ params["embedding"].T
    return logits.argmax(-1)


def write_sequence(
    params: gpt.Tensors, caches: Caches, tokens: torch.Tensor, positions: list[torch.Tensor], mode: str, size: gpt.Size
) -> tuple[list[list[int]], list[float]]:
    """Decodes greedily from the first bytes `tokens` [batch]; what each step wrote, and its seconds."""
    written, seconds = [], []
    for i, at in enumerate(positions):
        start = time.perf_counter()
        if mode == "donate":
            donate_buffer(caches)  # This is the whole change.
        tokens = decode(params, caches, tokens, i, at, mode, size)
        torch_xla.sync(wait=True)
        seconds.append(time.perf_counter() - start)
        written.append(tokens.tolist())
    return written, seconds


@dataclasses.dataclass(frozen=True)
class Result:
    """The results of a mode. Bytes are those of one step on a device."""

    mode: str
    written: list[list[list[int]]]  # of each sequence, step and batch row
    cache_tensors: int
    cache_bytes: int
    copied_bytes: int
    aliased_caches: int
    planned_bytes: int
    compilations: int
    tokens_per_second: float


def run(
    mode: str, size: gpt.Size, batch: int, tokens: int, sequences: int, dump: Path, advance
) -> tuple[Result, hlo.DumpedModule]:
    device = torch_xla.device()
    params = {name: p.to(device) for name, p in gpt.new_params(size).items()}
    positions = [torch.tensor([i]).to(device) for i in range(tokens)]
    text = gpt.read_text()
    shape = (batch * size.heads, size.context, size.width // size.heads)
    torch_xla.sync(wait=True)
    compiled = _compilations()
    written, seconds = [], []
    for number in range(sequences):
        caches = [[torch.zeros(shape).to(device) for _ in range(2)] for _ in range(size.layers)]
        first = torch.tensor(list(text[number * batch : (number + 1) * batch])).to(device)
        torch_xla.sync(wait=True)  # A tensor needs a buffer before it can be donated.
        result, took = write_sequence(params, caches, first, positions, mode, size)
        written.append(result)
        seconds.append(took)
        advance()

    step = step_module(dump)
    cache = next(s for s in step.after.parameters if s.dims == shape)
    result = Result(
        mode=mode,
        written=written,
        cache_tensors=2 * size.layers,
        cache_bytes=2 * size.layers * cache.bytes,
        copied_bytes=cache.bytes * _copies(step, cache),
        aliased_caches=sum(step.shape_of(alias).dims == shape for alias in step.aliases),
        planned_bytes=planned_bytes(step),
        compilations=_compilations() - compiled,
        tokens_per_second=batch / median(took for took_of_one in seconds[1:] for took in took_of_one),
    )
    return result, step


def _compilations() -> int:
    data = metrics.metric_data("CompileTime")
    return 0 if data is None else data[0]


def _copies(step: hlo.DumpedModule, cache: hlo.HloShape) -> int:
    """How many whole caches the compiled step copies."""
    text = step.after.path.read_text(encoding="utf-8")
    return len(re.findall(rf"= {re.escape(str(cache))}(?:{{[^}}]*}})? copy\(", text))


def show(console: Console, results: list[Result], tokens: int) -> bool:
    """Prints the comparison; whether all modes wrote the same."""
    same = all(result.written == results[0].written for result in results)
    table = Table(title="A step of the decode loop", title_justify="left", title_style="bold")
    table.add_column("")
    for result in results:
        table.add_column(result.mode, justify="right")
    rows = {
        "caches": [f"{r.cache_tensors} of {r.cache_bytes / r.cache_tensors / MIB:.1f} MiB" for r in results],
        "caches aliased to their old memory": [f"{r.aliased_caches} of {r.cache_tensors}" for r in results],
        "bytes copied per token": [f"{r.copied_bytes / MIB:.1f} MiB" for r in results],
        "memory of the step per device, as XLA planned it": [f"{r.planned_bytes / MIB:.1f} MiB" for r in results],
        f"graphs compiled for {tokens} positions": [str(r.compilations) for r in results],
        "tokens per second, whole batch": [f"{r.tokens_per_second:.0f}" for r in results],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console.print(table)
    verdict = "[green]the same[/]" if same else "[bold red]NOT the same[/]"
    console.print(f"tokens of all modes: {verdict}")
    return same


@click.command(help=__doc__.partition("\n")[0])
@click.option("--tokens", default=5, show_default=True, type=click.IntRange(min=1), help="Positions of a sequence.")
@click.option("--sequences", default=6, show_default=True, type=click.IntRange(min=2), help="The first one compiles.")
@click.option("--batch", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--layers", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--width", default=256, show_default=True, type=click.IntRange(min=4), help="A multiple of 4, the heads.")
@click.option("--context", default=2048, show_default=True, type=click.IntRange(min=2), help="Positions of a cache.")
@click.option("--out", default="out", show_default=True, type=click.Path(path_type=Path), help="Folder of the results.")
def main(tokens: int, sequences: int, batch: int, layers: int, width: int, context: int, out: Path) -> None:
    size = gpt.Size(layers=layers, width=width, context=context)
    if tokens > context:
        raise click.BadParameter(f"--tokens is {tokens}; a cache of --context {context} has no room for them")
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    dump = out / "kv_cache_hlo"
    shutil.rmtree(dump, ignore_errors=True)
    dump.mkdir(parents=True)
    # Before anything is computed: XLA reads its flags once.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={dump} --xla_dump_hlo_as_text".strip()
    os.environ.update({"XLA_FLAGS": flags, "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU")})

    results, steps = [], {}
    with Progress(console=console, disable=not console.is_terminal) as progress:
        for mode in MODES:
            task = progress.add_task(mode, total=sequences)
            advance = functools.partial(progress.advance, task)
            result, steps[mode] = run(mode, size, batch, tokens, sequences, dump, advance)
            results.append(result)
    reuse = print_reuse(console, steps)
    numbers = [{**dataclasses.asdict(result), **reuse[result.mode]} for result in results]
    (out / "kv_cache.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
    sys.exit(0 if show(console, results, tokens) else 1)


if __name__ == "__main__":
    main()
