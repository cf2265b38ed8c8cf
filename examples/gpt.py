"""A small GPT over bytes, as functions of a dictionary of tensors, for `train_transformer.py` and `kv_cache.py`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable

import click
import torch
import torch.nn.functional as F

import torch_xla_donate

Tensors = dict[str, torch.Tensor]

BYTES = 256  # the vocabulary
OUTSIDE = ("embedding", "positions", "norm")  # parameters outside the blocks
# A few readable modules that every Python has.
MODULES = ("argparse", "dataclasses", "difflib", "inspect", "pathlib", "statistics", "textwrap", "threading")


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of the model. `context` is the longest sequence in bytes."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 64

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise click.BadParameter(f"--width is {self.width}; it must be a multiple of {self.heads}, the heads")


def read_text() -> bytes:
    """The source of some modules of the running Python: English and code, a few hundred kilobytes.

    Ends the program with a message if this Python came without them.
    """
    sources = []
    for name in MODULES:
        try:
            sources.append(inspect.getsource(pkgutil.resolve_name(name)))
        except (OSError, TypeError) as error:
            raise click.ClickException(f"{sys.executable} has no source of its module {name!r}: {error}") from error
    return "\n".join(sources).encode()


def new_params(size: Size, seed: int = 0) -> Tensors:
    """Random weights, on the CPU. Those of all blocks are stacked, so that a scan can go over them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    layers, width = size.layers, size.width
    narrow, residual = width**-0.5, (2 * layers * width) ** -0.5
    return {
        "embedding": normal(BYTES, width, scale=0.02),
        "positions": normal(size.context, width, scale=0.02),
        "norm": torch.ones(width),
        "norm1": torch.ones(layers, width),
        "qkv": normal(layers, width, 3 * width, scale=narrow),
        "project": normal(layers, width, width, scale=residual),
        "norm2": torch.ones(layers, width),
        "up": normal(layers, width, 4 * width, scale=narrow),
        "down": normal(layers, 4 * width, width, scale=residual / 2),
    }


def blocks_of(params: Tensors) -> Tensors:
    """The parameters of the blocks, each stacked along its first dimension."""
    return {name: p for name, p in params.items() if name not in OUTSIDE}


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def split_heads(x: torch.Tensor, block: Tensors, heads: int) -> list[torch.Tensor]:
    """Queries, keys and values [batch * heads, time, width / heads] of x [batch, time, width].

    One dimension for batch and heads, as the matrix products have it: of a cache that has to be reshaped for them XLA
    computes each update twice, once for the product and once for the cache, and copies the whole cache to do so.
    """
    mixed = normalised(x, block["norm1"]) @ block["qkv"]
    return [part.unflatten(-1, (heads, -1)).transpose(1, 2).flatten(0, 1) for part in mixed.chunk(3, dim=-1)]


def attended(
    x: torch.Tensor, block: Tensors, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """The rest of a block: attention to the positions that are `visible`, then the perceptron."""
    # Keys first, so that it is the few queries that are transposed and not a whole cache of keys.
    scores = (k @ q.transpose(-1, -2)).transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible, -1e9).softmax(-1)
    mixed = (weights @ v).unflatten(0, (len(x), -1)).transpose(1, 2).flatten(-2)
    x = x + mixed @ block["project"]
    return x + F.gelu(normalised(x, block["norm2"]) @ block["up"], approximate="tanh") @ block["down"]


@functools.cache
def body_of(heads: int) -> Callable[[torch.Tensor, Tensors], tuple[torch.Tensor, None]]:
    """The body of the scan over the blocks: the same function in each step, so that torch_xla traces it only once."""

    def body(x: torch.Tensor, block: Tensors) -> tuple[torch.Tensor, None]:
        q, k, v = split_heads(x, block, heads)
        at = torch.arange(x.shape[1], device=x.device)
        return attended(x, block, q, k, v, visible=at[:, None] >= at), None

    return body


def logits_of(params: Tensors, tokens: torch.Tensor, size: Size) -> torch.Tensor:
    """Logits [batch, time, 256] of the next bytes of `tokens` [batch, time]. The blocks are one scan."""
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    x, _ = torch_xla_donate.scan(body_of(size.heads), x, blocks_of(params), is_fn_pure=True)
    return normalised(x, params["norm"]) @ params["embedding"].T


def loss_of(params: Tensors, text: torch.Tensor, size: Size) -> torch.Tensor:
    """Mean cross entropy, in nats a byte, of each byte of `text` [batch, time + 1] from those before it."""
    logits = logits_of(params, text[:, :-1], size)
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
