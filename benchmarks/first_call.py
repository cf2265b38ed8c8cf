"""What a program pays once: the import of the package, and the first call of a compiled function, beside jax.jit."""

from __future__ import annotations

import compileall
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics

import torch_xla_donate

sys.path.append(str(_common.FOLDER.parent / "examples"))
import gpt

SIZE = gpt.Size()
TINY_SIZE = gpt.Size(layers=1, width=8, context=4)
BATCH, RATE = 2, 0.01
PURE, STOCK, JAX = "pure=True", "not donated", "JAX, donated"
VARIANTS = (PURE, STOCK, JAX)
MOST_IMPORT_MS = 120


def loss_of(params: Any, text: Any, size: gpt.Size) -> Any:
    """gpt.loss_of(), with a loop in Python over the blocks, which jax.jit traces in the same way."""
    tokens = text[:, :-1]
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    at = torch.arange(x.shape[1], device=x.device)
    for layer in range(size.layers):
        block = {name: p[layer] for name, p in gpt.blocks_of(params).items()}
        q, k, v = gpt.split_heads(x, block, size.heads)
        x = gpt.attended(x, block, q, k, v, visible=at[:, None] >= at)
    logits = gpt.normalised(x, params["norm"]) @ params["embedding"].T
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def torch_step(params: Any, text: Any, size: gpt.Size) -> Any:
    leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
    gradients = torch.autograd.grad(loss_of(leaves, text, size), list(leaves.values()))
    return {name: p - RATE * gradient for (name, p), gradient in zip(params.items(), gradients)}


def jax_step(params: Any, text: Any, size: gpt.Size) -> Any:
    import jax
    import jax.numpy as jnp

    def normalised(x: Any, weight: Any) -> Any:
        return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def split(part: Any) -> Any:
        heads = part.reshape(*part.shape[:2], size.heads, -1).swapaxes(1, 2)
        return heads.reshape(-1, *heads.shape[2:])

    def loss(params: Any) -> Any:
        tokens = text[:, :-1]
        x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
        at = jnp.arange(x.shape[1])
        for layer in range(size.layers):
            block = {name: p[layer] for name, p in gpt.blocks_of(params).items()}
            mixed = normalised(x, block["norm1"]) @ block["qkv"]
            q, k, v = map(split, jnp.split(mixed, 3, axis=-1))
            scores = (k @ q.swapaxes(-1, -2)).swapaxes(-1, -2) / math.sqrt(q.shape[-1])
            weights = jax.nn.softmax(jnp.where(at[:, None] >= at, scores, -1e9), axis=-1)
            heads = (weights @ v).reshape(len(x), size.heads, x.shape[1], -1).swapaxes(1, 2)
            x = x + heads.reshape(x.shape) @ block["project"]
            x = x + jax.nn.gelu(normalised(x, block["norm2"]) @ block["up"], approximate=True) @ block["down"]
        logits = normalised(x, params["norm"]) @ params["embedding"].T
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1)
        return -chosen.mean()

    gradients = jax.grad(loss)(params)
    return {name: p - RATE * gradients[name] for name, p in params.items()}


def worker(variant: str, size: gpt.Size) -> None:
    """Prints how long the first call took, XLA's compiler alone, and how far the parameters moved."""
    params = gpt.new_params(size)
    text = torch.frombuffer(bytearray(gpt.read_text()[: BATCH * (size.context + 1)]), dtype=torch.uint8)
    text = text.view(BATCH, -1).to(torch.int32)
    if variant == JAX:
        import jax

        step = jax.jit(functools.partial(jax_step, size=size), donate_argnums=0)
        state, batch = jax.device_put(({name: p.numpy() for name, p in params.items()}, text.numpy()))
        jax.block_until_ready(state["norm"] + 1)  # the runtime and the compiler have started
        start = time.perf_counter()
        lowered = step.lower(state, batch)
        traced = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - traced
        state = jax.block_until_ready(compiled(state, batch))
    else:
        function = functools.partial(torch_step, size=size)
        step = (
            torch_xla_donate.compile(function, donate_argnums=0, pure=True)
            if variant == PURE
            else torch_xla.compile(function)
        )
        state, batch = {name: p.to("xla") for name, p in params.items()}, text.to("xla")
        _common.step()
        started = state["norm"] + 1
        _common.step()
        del started
        before = compile_seconds()
        start = time.perf_counter()
        state = step(state, batch)
        xm.wait_device_ops()
        compile_s = compile_seconds() - before
    seconds = time.perf_counter() - start
    new = {name: torch.tensor(np.asarray(p)) if variant == JAX else p.cpu() for name, p in state.items()}
    moved = {name: float((new[name] - p).abs().sum()) for name, p in params.items()}
    print(json.dumps({"seconds": seconds, "compile": compile_s, "moved": moved}))


def compile_seconds() -> float:
    found = metrics.metric_data("CompileTime")
    return found[1] / 1e9 if found else 0.0


def answer(code: list[str]) -> Any:
    done = subprocess.run([sys.executable, *code], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def import_seconds(lines: str) -> float:
    """How long the lines take in a new process that has imported torch_xla."""
    clock = "import time, torch_xla\nstart = time.perf_counter()\n"
    return float(answer(["-c", f"{clock}{lines}\nprint(time.perf_counter() - start)"]))


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    rows = [
        [
            row["variant"],
            f"{row['seconds']:.2f}",
            f"{row['compile']:.2f}",
            f"{row['seconds'] - row['compile']:.2f}",
            _common.shown(row["over_jax"], 2),
        ]
        for row in result["rows"]
    ]
    columns = ("first call", "s", "of it XLA's compiler", "the rest", "the rest, beside JAX (95%)")
    ms = result["import_ms"]
    caption = (
        f"The import takes {ms['median']:.0f} ms ({ms['low']:.0f} to {ms['high']:.0f}) over torch_xla's own. "
        + _common.aim(result)
    )
    return {"all": _common.Table("first_call: a step of a transformer with 4 layers", columns, rows, caption)}


@click.command()
@_common.tiny_option
@_common.results_option
@click.option("--worker", "variant", type=click.Choice(VARIANTS), hidden=True)
def main(tiny: bool, results: Path, variant: str | None) -> None:
    """The first call and the import."""
    if variant is not None:
        worker(variant, TINY_SIZE if tiny else SIZE)
        return
    rounds = 1 if tiny else 7
    # pip writes bytecode for what it installs, so torch_xla and JAX have theirs; this clone may have none.
    compileall.compile_dir(Path(torch_xla_donate.__file__).parent, quiet=1)
    found: dict[str, list[Any]] = {variant: [] for variant in VARIANTS}

    def call(variant: str) -> float:
        found[variant].append(answer([__file__, "--worker", variant, *(["--tiny"] if tiny else [])]))
        return float(found[variant][-1]["seconds"] - found[variant][-1]["compile"])

    turns: dict[str, Callable[[], float]] = {variant: functools.partial(call, variant) for variant in VARIANTS}
    turns["import"] = functools.partial(import_seconds, "import torch_xla_donate")
    samples = _common.side_by_side(turns, rounds)
    for one in (one for runs in found.values() for one in runs):
        expected = found[STOCK][0]["moved"]
        if not all(
            moved > 0 and math.isclose(moved, expected[name], rel_tol=0.01) for name, moved in one["moved"].items()
        ):
            raise AssertionError(f"the parameters move by {one['moved']}, not by {expected}")
    result = _common.describe("first_call", {"tiny": tiny}, "jax", "jaxlib")
    result["rows"] = [
        {
            "variant": variant,
            "seconds": statistics.median(one["seconds"] for one in runs),
            "compile": statistics.median(one["compile"] for one in runs),
            "over_jax": _common.ratio(samples[variant], samples[JAX]),
        }
        for variant, runs in found.items()
    ]
    result["import_ms"] = _common.spread([seconds * 1e3 for seconds in samples["import"]])
    result["aim"] = {
        "text": f"the import takes at most {MOST_IMPORT_MS} ms",
        "met": result["import_ms"]["median"] <= MOST_IMPORT_MS,
    }
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
