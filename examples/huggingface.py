"""Trains and runs a Llama of Hugging Face's transformers: what torch_xla, marks and auto_donate each reuse.

Seven programs as users write them, each run in three ways: with torch_xla only, with `donate_buffer`, and with
`auto_donate()` and no other change. The weights are random.

    python examples/huggingface.py

torch_xla reuses the memory of tensors that are updated in place: of `torch.optim.AdamW`, `AveragedModel`, gradients
that accumulate, and `StaticCache`. There donation adds hardly a byte, but each tensor keeps its own memory, which saves
copies (docs/examples.md). It adds the bytes of averages that are new tensors at each step, and of caches that are
written by slice assignment.

Each run is a separate process. Those with torch_xla only do not import this package.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch_xla
from rich.console import Console
from rich.table import Table
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import StaticLayer

WAYS = ("torch_xla", "by hand", "auto")  # without this package, with donate_buffer, with auto_donate()
VOCABULARY, HEADS, KEY_HEADS, BATCH, DECAY = 256, 4, 2, 2, 0.99

Mark = Callable[[object], None]  # donate_buffer, or nothing
Result = tuple[list[str], list[torch.Tensor]]  # losses or tokens, and the tensors that the last step replaced


@dataclass(frozen=True)
class Size:
    layers: int
    width: int
    context: int
    steps: int


def new_model(size: Size) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=2 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=size.context,
    )
    return LlamaForCausalLM(config).to("xla")


def new_batch(size: Size, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (BATCH, size.context), generator=generator).to("xla")


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def train(size: Size, mark: Mark, average: str = "") -> Result:
    """AdamW, with an average of the weights that is updated in place, or is a new tensor at each step, or without."""
    model = new_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)) if average == "in place" else None
    ema = {name: p.detach().clone() for name, p in model.named_parameters()} if average == "new" else {}
    torch_xla.sync()
    losses = []
    for number in range(size.steps):
        mark([list(model.parameters()), moments(optimizer), ema, list(averaged.parameters()) if averaged else []])
        batch = new_batch(size, number)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if averaged:
            averaged.update_parameters(model)
        ema = {name: DECAY * old + (1 - DECAY) * model.get_parameter(name).detach() for name, old in ema.items()}
        torch_xla.sync()
        losses.append(loss.item().hex())
    averages = list(averaged.parameters()) if averaged else list(ema.values())
    return losses, [*model.parameters(), *moments(optimizer), *averages]


def accumulate(size: Size, mark: Mark, every: int) -> Result:
    """A step for each micro batch. Every few of them AdamW updates the weights, in the step of the last one."""
    model = new_model(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch_xla.sync()
    losses = []
    for number in range(1, 2 * every + 1 if every else size.steps + 1):
        last = every > 0 and number % every == 0
        mark([list(model.parameters()), moments(optimizer)] if last else gradients(model))
        batch = new_batch(size, number)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item().hex())
    if every:
        return losses, [*model.parameters(), *moments(optimizer)]
    return losses, gradients(model)


class SliceLayer(StaticLayer):
    """A cache that is written by slice assignment, at a position that is a Python number."""

    position = 0

    def update(self, key_states, value_states, cache_kwargs=None):
        end = self.position + key_states.shape[2]
        self.keys[:, :, self.position : end] = key_states
        self.values[:, :, self.position : end] = value_states
        self.position = end
        return self.keys, self.values


@torch.no_grad()
def generate(size: Size, mark: Mark, layer: type[StaticLayer]) -> Result:
    """Greedy decoding, one step for each token."""
    model = new_model(size).eval()
    cache = StaticCache(model.config, max_cache_len=size.context)
    cache.layers = [layer(size.context) for _ in cache.layers]
    tokens = torch.arange(BATCH)[:, None].to("xla")
    cache.early_initialization(BATCH, KEY_HEADS, size.width // HEADS, torch.float32, tokens.device)
    torch_xla.sync()
    written = []
    for position in range(size.steps):
        mark([tokens, [[layer.keys, layer.values] for layer in cache.layers]])
        at = torch.tensor([position]).to("xla")
        logits = model(input_ids=tokens, past_key_values=cache, cache_position=at).logits
        tokens = logits[:, -1:].argmax(-1)
        torch_xla.sync()
        written.append(str(tokens.flatten().tolist()))
    return written, [tokens, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]


PROGRAMS: dict[str, Callable[[Size, Mark], Result]] = {
    "AdamW": train,
    "AdamW, AveragedModel": functools.partial(train, average="in place"),
    "AdamW, average as new tensors": functools.partial(train, average="new"),
    "gradients of a micro batch": functools.partial(accumulate, every=0),
    "AdamW after 3 micro batches": functools.partial(accumulate, every=3),
    "decoding, StaticCache": functools.partial(generate, layer=StaticLayer),
    "decoding, slice assignment": functools.partial(generate, layer=SliceLayer),
}


def run(program: str, way: str, size: Size, folder: Path) -> None:
    """Runs a program, and leaves XLA's dump and `result.json` in the folder."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()
    os.environ.update({"XLA_FLAGS": flags, "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", "CPU")})
    mark: Mark = lambda tensors: None  # noqa: E731
    if way != "torch_xla":
        from torch_xla_donate import donate_buffer, set_auto_donate

        set_auto_donate(way == "auto")
        mark = donate_buffer if way == "by hand" else mark
    values, replaced = PROGRAMS[program](size, mark)
    result = {"values": values, "bytes": sum(tensor.nbytes for tensor in replaced)}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def run_all(programs: Sequence[str], size: Size, out: Path) -> dict[tuple[str, str], Path]:
    """The folder of each run. A run is a fork of this process, which has imported transformers but started nothing."""
    folders = {}
    for program in programs:
        for way in WAYS:
            folder = out / program.replace(" ", "_") / way.replace(" ", "_")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            child = multiprocessing.get_context("fork").Process(target=run, args=(program, way, size, folder))
            child.start()
            child.join()
            if child.exitcode:
                raise click.ClickException(f"{program!r} with {way} failed with exit code {child.exitcode}")
            folders[program, way] = folder
    return folders


def show(console: Console, folders: Mapping[tuple[str, str], Path]) -> bool:
    """Prints the table; whether all ways of a program computed the same values."""
    # Here, not above: the runs are forks of this process, and one way does not import the package.
    from _show import step_module
    from _tpu import MISSING, on_cpu, on_tpu

    table = Table(title="Bytes that the step of each program reuses", title_justify="left", title_style="bold")
    table.add_column("", no_wrap=True)
    for column in ("could be", *(column for way in WAYS for column in (f"{way}, CPU", "on v6e"))):
        table.add_column(column, justify="right")
    same = True
    for program in dict.fromkeys(program for program, _ in folders):
        results = {way: json.loads((folders[program, way] / "result.json").read_text("utf-8")) for way in WAYS}
        first = results[WAYS[0]]
        same &= all(result["values"] == first["values"] for result in results.values())
        cells = [f"{first['bytes']:,}"]
        for way in WAYS:
            step = step_module(folders[program, way])
            tpu = on_tpu(step)
            cells += [f"{on_cpu(step).aliased_bytes:,}", MISSING if tpu is None else f"{tpu.aliased_bytes:,}"]
        table.add_row(program, *cells)
    console.print(table)
    verdict = "[green]identical bit for bit[/]" if same else "[bold red]NOT identical[/]"
    console.print(f"losses and tokens of the three ways: {verdict}")
    return same


@click.command(help=__doc__.partition("\n")[0])
@click.option("--program", "programs", multiple=True, type=click.Choice(list(PROGRAMS)), help="Default: all.")
@click.option("--layers", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--width", default=64, show_default=True, type=click.IntRange(min=8), help="A multiple of 8.")
@click.option("--context", default=32, show_default=True, type=click.IntRange(min=4), help="Positions of a sequence.")
@click.option("--steps", default=4, show_default=True, type=click.IntRange(min=3), help="Of a program.")
@click.option("--out", default="out", show_default=True, type=click.Path(path_type=Path), help="Folder of the results.")
def main(programs: Sequence[str], layers: int, width: int, context: int, steps: int, out: Path) -> None:
    if width % 8 or steps > context:
        raise click.BadParameter("--width must be a multiple of 8, and --context at least --steps")
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    folders = run_all(programs or list(PROGRAMS), Size(layers, width, context, steps), out / "huggingface")
    sys.exit(0 if show(console, folders) else 1)


if __name__ == "__main__":
    main()
