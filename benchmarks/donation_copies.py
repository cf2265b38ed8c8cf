"""Copies that XLA adds, or omits, because an input is donated: with its compilers for CPU and for TPUs, and their time.

A donated input is overwritten, so XLA copies it if it is read later, or if the compiler cannot tell. TPUs need not be
there. The time is that of the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import _common
import click
import torch
import torch.nn.functional as F

import torch_xla_donate
from torch_xla_donate.hlo.dump import copies

Tensors = list[torch.Tensor]
# Takes the donated state and other inputs, returns the new state and other outputs.
Program = Callable[..., tuple[Tensors, Tensors]]

CPU, TOPOLOGIES = "cpu", ("v4:2x2x1", "v6e:1x1")
# Donated arrays of 4 to 32 MiB on CPU, which runs them, and of 256 MiB to 2 GiB on TPUs, so that none fits in the fast
# memory there, where copies cost little.
SIZE_ON_CPU, SIZE_ON_TPU = 1024, 8192
BATCH, ROWS, HEADS, RATE = 8, 64, 8, 1e-3
ROUNDS, SECONDS_OF_A_SAMPLE = 21, 0.05


def write_row(state: Tensors, row: torch.Tensor, index: torch.Tensor) -> tuple[Tensors, Tensors]:
    return [state[0].index_copy(0, index, row[None])], []


def assign_slice(state: Tensors, row: torch.Tensor) -> tuple[Tensors, Tensors]:
    cache = state[0].clone()
    cache[3] = row
    return [cache], []


def attend(state: Tensors, token: torch.Tensor, key: torch.Tensor) -> tuple[Tensors, Tensors]:
    """One token reads the cache, which is (positions, width)."""
    cache = state[0].clone()
    cache[3] = token @ key
    return [cache], [torch.softmax(token @ cache.T, -1) @ cache]


def attend_with_heads(state: Tensors, token: torch.Tensor, key: torch.Tensor) -> tuple[Tensors, Tensors]:
    """The cache is (positions, heads, width of a head)."""
    cache, heads = state[0].clone(), token.view(HEADS, -1)
    cache[3] = (token @ key).view(HEADS, -1)
    scores = torch.softmax(torch.einsum("hw,phw->hp", heads, cache), -1)
    return [cache], [torch.einsum("hp,phw->hw", scores, cache)]


def attend_in_a_batch(state: Tensors, tokens: torch.Tensor, key: torch.Tensor) -> tuple[Tensors, Tensors]:
    """The cache is (sequences, positions, width)."""
    cache = state[0].clone()
    cache[:, 3] = tokens @ key
    return [cache], [torch.softmax(tokens[:, None] @ cache.transpose(1, 2), -1) @ cache]


def gradients(weights: Tensors, x: torch.Tensor) -> Tensors:
    """Of three layers: the backward pass reads the weights of the layers above."""

    def loss(weights: Tensors) -> torch.Tensor:
        y = x
        for weight in weights:
            y = torch.tanh(y @ weight)
        return F.mse_loss(y, x)

    return list(torch.func.grad(loss)(weights))


def sgd(state: Tensors, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    return [weight - RATE * grad for weight, grad in zip(state, gradients(state, x))], []


def adam(state: Tensors, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    weights, means, squares = state[:3], state[3:6], state[6:]
    found = gradients(weights, x)
    means = [0.9 * mean + 0.1 * grad for mean, grad in zip(means, found)]
    squares = [0.999 * square + 0.001 * grad * grad for square, grad in zip(squares, found)]
    weights = [w - RATE * mean / (square.sqrt() + 1e-8) for w, mean, square in zip(weights, means, squares)]
    return [*weights, *means, *squares], []


def add_four_times(state: Tensors, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    (total,) = state
    for factor in (2, 3, -2, -3):
        total = total + factor * x
    return [total], []


def two_outputs(state: Tensors, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    return [state[0] - RATE * x], [state[0] + x]


def sum_of_old(state: Tensors, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    return [state[0] - RATE * x], [(state[0] * state[0]).sum(0)]


def product_with_old(state: Tensors, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    return [state[0] + 1], [x @ state[0]]


def change_places(state: Tensors) -> tuple[Tensors, Tensors]:
    return [state[1] + 1, state[0] - 1], []


def transpose(state: Tensors, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    return [state[0].T - RATE * x], []


def gather_and_overwrite(state: Tensors, index: torch.Tensor) -> tuple[Tensors, Tensors]:
    rows = state[0][index]
    return [state[0].index_copy(0, index, -rows)], [rows]


def gather_others(state: Tensors, index: torch.Tensor, written: torch.Tensor) -> tuple[Tensors, Tensors]:
    rows = state[0][index]
    return [state[0].index_copy(0, written, -rows)], [rows, state[0][index + 1]]


def multiply_by_itself(state: Tensors) -> tuple[Tensors, Tensors]:
    return [state[0] @ state[0]], []


# A letter for each kind of array, with its shape. Those of indices are I and J.
KINDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "W": lambda size: (size, size),
    "C": lambda size: (4 * size, size),  # a cache of positions, or a table
    "H": lambda size: (4 * size, HEADS, size // HEADS),
    "B": lambda size: (BATCH, size, size),
    "X": lambda size: (ROWS, size),
    "T": lambda size: (BATCH, size),
    "V": lambda size: (size,),
    "w": lambda size: (size // 2, size // 2),
    "c": lambda size: (2 * size, size // 2),
    "v": lambda size: (size // 2,),
    "I": lambda size: (1,),
    "J": lambda size: (ROWS,),
}
# The program, the kinds of its state and those of its other inputs.
PROGRAMS: dict[str, tuple[Program, str, str]] = {
    "cache: index_copy": (write_row, "C", "VI"),
    "cache: slice": (assign_slice, "C", "V"),
    "cache: slice, read by a vector": (attend, "C", "VW"),
    "narrow cache: slice, read by a vector": (attend, "c", "vw"),
    "cache: slice, read by heads": (attend_with_heads, "H", "VW"),
    "cache: slice, read by a batch": (attend_in_a_batch, "B", "TW"),
    "table: gather, overwrite": (gather_and_overwrite, "C", "J"),
    "table: gather, overwrite others": (gather_others, "C", "JJ"),
    "four additions": (add_four_times, "W", "W"),
    "two arrays change places": (change_places, "WW", ""),
    "transposed update": (transpose, "W", "W"),
    "SGD of three layers": (sgd, "WWW", "X"),
    "Adam of three layers": (adam, "WWWWWWWWW", "X"),
    "update, and another output": (two_outputs, "W", "W"),
    "update, and sums of old": (sum_of_old, "W", "W"),
    "update, and x @ old": (product_with_old, "W", "X"),
    "old @ old": (multiply_by_itself, "W", ""),
}
TINY = ("cache: index_copy", "SGD of three layers", "old @ old")


def array(kind: str, size: int, seed: int) -> torch.Tensor:
    shape, numbers = KINDS[kind](size), torch.Generator().manual_seed(seed)
    if kind in "IJ":
        return (torch.arange(shape[0]) * 7).to("xla")
    if kind in "Ww":  # its products keep their size
        return torch.linalg.qr(torch.randn(shape, generator=numbers))[0].contiguous().to("xla")
    return torch.randn(shape, generator=numbers).to("xla")


def placeholder(kind: str, size: int) -> torch.Tensor:
    return torch_xla_donate.placeholder(KINDS[kind](size), torch.int64 if kind in "IJ" else torch.float32)


def donating(program: str, is_donated: bool) -> Any:
    return torch_xla_donate.compile(PROGRAMS[program][0], donate_argnums=0 if is_donated else (), pure=True)


def described(executable: Any) -> dict[str, int]:
    found = [shape.bytes for shape, _ in copies(executable.as_text())]
    memory = executable.memory_analysis()
    return {
        "copies": len(found),
        "copied_bytes": sum(found),
        "peak_bytes": memory.peak_bytes,
        "alias_bytes": memory.alias_bytes,
    }


def compiled(program: str, size: int, topology: str) -> dict[str, dict[str, int]]:
    """What a compiler makes of the program, with its state donated and without."""
    state, others = ([placeholder(kind, size) for kind in kinds] for kinds in PROGRAMS[program][1:])
    target = () if topology == CPU else (topology,)
    return {
        name: described(donating(program, is_donated).lower(state, *others).compile(*target))
        for name, is_donated in (("not donated", False), ("donated", True))
    }


def time_on_cpu(program: str, size: int, rounds: int) -> dict[str, float]:
    """Time of a step whose state is donated, relative to one whose state is not."""
    _, kinds, others = PROGRAMS[program]
    inputs = [array(kind, size, 100 + seed) for seed, kind in enumerate(others)]

    def loop(is_donated: bool) -> Callable[[], None]:
        step = donating(program, is_donated)
        state = [array(kind, size, seed) for seed, kind in enumerate(kinds)]

        def run() -> None:
            state[:], _ = step(state, *inputs)
            _common.step()

        for _ in range(3):
            run()
        return run

    def sampled(run: Callable[[], None], repeat: int) -> _common.Timed:
        return lambda: _common.wall(lambda: [run() for _ in range(repeat)])

    loops = {"donated": loop(True), "not donated": loop(False)}
    repeat = max(1, int(SECONDS_OF_A_SAMPLE / max(map(_common.wall, loops.values()))))
    samples = _common.side_by_side({name: sampled(run, repeat) for name, run in loops.items()}, rounds)
    return _common.ratio(samples["donated"], samples["not donated"])


def added(found: Mapping[str, Mapping[str, int]]) -> int:
    """The bytes that a compiler copies because of the donation; negative if it copies less."""
    return found["donated"]["copied_bytes"] - found["not donated"]["copied_bytes"]


def relative(row: Mapping[str, Any], compiler: str) -> float:
    """The bytes that a compiler adds, as a multiple of the donated bytes."""
    return added(row["compilers"][compiler]) / row["donated_bytes"][compiler]


def tables(result: Mapping[str, Any]) -> dict[str, _common.Table]:
    def copied(row: Mapping[str, Any], compiler: str) -> str:
        found = [row["compilers"][compiler][name]["copied_bytes"] for name in ("not donated", "donated")]
        return ", ".join(f"{count / row['donated_bytes'][compiler]:.2f}" for count in found)

    def peak(row: Mapping[str, Any], compiler: str) -> str:
        found = row["compilers"][compiler]
        return f"{found['donated']['peak_bytes'] / found['not donated']['peak_bytes']:.2f}"

    compilers = result["compilers"]
    names = ["CPU", *(topology.partition(":")[0] for topology in compilers[1:])]
    return {
        "all": _common.Table(
            "donation_copies: bytes copied without and with donation / donated bytes; donated / not donated",
            (
                "program",
                *(f"copied: {name}" for name in names),
                *(f"peak: {name}" for name in names),
                "time on CPU (95%)",
            ),
            [
                (
                    row["program"],
                    *(copied(row, compiler) for compiler in compilers),
                    *(peak(row, compiler) for compiler in compilers),
                    _common.shown(row["time"], 2),
                )
                for row in result["rows"]
            ],
            _common.aim(result),
        )
    }


@click.command()
@_common.tiny_option
@_common.results_option
def main(tiny: bool, results: Path) -> None:
    """Copies of donated buffers; some minutes, most of them in the compilers for TPUs."""
    sizes = {CPU: 64 if tiny else SIZE_ON_CPU, **dict.fromkeys(TOPOLOGIES[-1:] if tiny else TOPOLOGIES, SIZE_ON_TPU)}
    rows = []
    for program in TINY if tiny else PROGRAMS:
        found = {compiler: compiled(program, size, compiler) for compiler, size in sizes.items()}
        rows.append(
            {
                "program": program,
                "compilers": found,
                "donated_bytes": {compiler: of["donated"]["alias_bytes"] for compiler, of in found.items()},
                "time": time_on_cpu(program, sizes[CPU], 2 if tiny else ROUNDS),
            }
        )
    result = _common.describe("donation_copies", {"tiny": tiny}, "jax", "libtpu")
    result["compilers"] = list(sizes)
    result["sizes"] = sizes
    result["rows"] = rows
    result["aim"] = {
        "text": "a donation takes no more memory with any compiler, and adds no more copies for a TPU than for CPU",
        "met": all(
            found["donated"]["peak_bytes"] <= 1.01 * found["not donated"]["peak_bytes"]
            and relative(row, compiler) <= max(0.0, relative(row, CPU)) + 0.01
            for row in rows
            for compiler, found in row["compilers"].items()
        ),
    }
    _common.finish(results, result, tables(result))


if __name__ == "__main__":
    main()
