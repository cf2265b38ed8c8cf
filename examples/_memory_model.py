"""Llama's shapes, and a formula for the bytes that a training step of `llama.py` takes on each TPU."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

MIB = 1 << 20
INK = "#7d8590"  # readable on a light and on a dark page
COLOURS = {"1b": "#2f81f7", "8b": "#d29922", "70b": "#a371f7"}
STYLE = Path(__file__).resolve().parent.parent / "benchmarks" / "figures.mplstyle"
OUTSIDE = ("embedding", "norm", "head")  # weights outside the layers


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the batch of its step: `accumulate` sequences, one after another."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128_256
    is_tied: bool = False
    sequence: int = 4096
    accumulate: int = 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The weights. Those of the layers are stacked, so that a scan goes over them."""
        layers, width, hidden = self.layers, self.width, self.hidden
        kv = width // self.heads * self.kv_heads
        found = {
            "embedding": (self.vocabulary, width),
            "norm": (width,),
            "norm1": (layers, width),
            "q": (layers, width, width),
            "k": (layers, width, kv),
            "v": (layers, width, kv),
            "o": (layers, width, width),
            "norm2": (layers, width),
            "gate": (layers, width, hidden),
            "up": (layers, width, hidden),
            "down": (layers, hidden, width),
        }
        return found if self.is_tied else found | {"head": (self.vocabulary, width)}


SIZES = {
    "tiny": Size(2, 256, 8, 4, 512, 1024, sequence=128),
    "1b": Size(16, 2048, 32, 8, 8192, is_tied=True),
    "8b": Size(32, 4096, 32, 8, 14_336),
    "70b": Size(80, 8192, 64, 8, 28_672),
}


def spec(name: str, rank: int) -> tuple[str | None, ...]:
    """The dimension of a weight, and of its moments and gradient, that the devices share; none of a norm."""
    shared = {"embedding": 0, "head": 0, "down": 1}.get(name, None if "norm" in name else 2)
    return tuple("model" if dimension == shared else None for dimension in range(rank))


def padded(bits: int, dims: tuple[int, ...]) -> int:
    """The bytes of an array on a TPU from v4 on, in the layout that pads least. Numbers of 64 bits are two of 32."""

    def up(count: int, unit: int) -> int:
        return -(-count // unit) * unit

    def power(count: int) -> int:
        return 1 << max(count - 1, 0).bit_length()

    rows = 32 // min(bits, 32)
    if len(dims) < 2:
        count = math.prod(dims)
        return up(count, min(max(power(count), rows * 128), 1024)) * bits // 8
    sizes = []
    for row in range(len(dims)):
        for lane in range(len(dims)):
            if row != lane:
                tile = min(max(power(dims[row]), rows), 8)
                others = math.prod(dims) // dims[row] // dims[lane]
                sizes.append(others * up(dims[row], tile) * up(dims[lane], 128) * bits // 8)
    return min(sizes)


def on_device(name: str, shape: tuple[int, ...], bits: int, devices: int) -> int:
    """The bytes of a weight, or of a moment or gradient of it, on each device."""
    shared = spec(name, len(shape))
    return padded(bits, tuple(-(-count // devices) if axis else count for count, axis in zip(shape, shared)))


def weights(size: Size, devices: int) -> int:
    """Bytes of the bf16 weights on each device. The gradients have as many."""
    return sum(on_device(name, shape, 16, devices) for name, shape in size.shapes().items())


def state(size: Size, devices: int) -> int:
    """Bytes of the weights, of AdamW's two fp32 moments and of the step's number on each device."""
    moments = sum(on_device(name, shape, 32, devices) for name, shape in size.shapes().items())
    return weights(size, devices) + 2 * moments + padded(32, ())


def arguments(size: Size, devices: int) -> int:
    """The state, the batch, and the 15 numbers that torch_xla passes to the step, two of them of 64 bits."""
    batch = padded(32, (size.accumulate, 1, size.sequence + 1))
    return state(size, devices) + batch + 13 * padded(32, ()) + 2 * padded(64, ())


def outputs(size: Size, devices: int, generation: str) -> int:
    """The state, the loss, and the table of the outputs' addresses."""
    count, unit = 3 * len(size.shapes()) + 2, 32 if generation in ("v5p", "v6e") else 512
    return state(size, devices) + padded(32, ()) + -(-4 * count // unit) * unit


def temporaries(size: Size, devices: int) -> int:
    """The largest temporaries of a step that donates. The factors 5.5 and 3.75 are measured, not derived.

    There are two large moments. In the backward pass of a layer there are two sets of gradients (the sum so far, and
    those of this sequence), and 5.5 fp32 arrays of attention scores. After the last layer the new sum is a third set;
    the compiler's heap takes 0.5 to 1.1 sets more. The forward pass has saved the input of each layer all the time.
    With more devices than heads XLA divides heads, and this does not hold.
    """
    gradients = weights(size, devices)
    saved = padded(16, (size.layers, size.sequence, -(-size.width // devices)))
    scores = padded(32, (-(-size.heads // devices), size.sequence, size.sequence))
    # One embedding for input and output has two gradients.
    embedding = on_device("embedding", (size.vocabulary, size.width), 16, devices) if size.is_tied else 0
    return saved + max(2 * gradients + embedding + scores * 11 // 2, gradients * 15 // 4)


def total(size: Size, devices: int, topology: str, donates: bool) -> int:
    """Arguments, outputs and temporaries on each device, less the aliases. Updates in place donate, too.

    Without donation this is a lower bound: the temporaries are in the memory of the new state as far as they fit.
    """
    generation = topology.partition(":")[0]
    kept = arguments(size, devices)
    new = outputs(size, devices, generation)
    if donates:
        return kept + new - state(size, devices) + temporaries(size, devices)
    return kept + max(new, temporaries(size, devices))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The bytes on each device over the number of devices: the formula as lines, the compiler's answers as points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.style.context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7.5, 4.4), layout="constrained")
        counts = [1, 2, 4, 8, 16, 32, 64]
        for name, colour in COLOURS.items():
            size = SIZES[name]
            for donates, style in ((True, "-"), (False, ":")):
                label = f"{name.upper()}, {'donated' if donates else 'functional'}"
                values = [total(size, count, "v6e", donates) / 2**30 for count in counts]
                axes.plot(counts, values, style, color=colour, linewidth=1.3, label=label)
                found = [row for row in rows if row["size"] == name and (row["way"] == "functional") != donates]
                places = [(row["devices"], measured(row) / 2**30) for row in found if "memory" in row]
                marker = {"marker": "o", "markerfacecolor": colour if donates else "none", "markeredgecolor": colour}
                axes.plot(*zip(*places), linestyle="none", **marker) if places else None
        for limit, generation in ((31.25, "v6e"), (15.75, "v5e")):
            axes.axhline(limit, color=INK, linewidth=0.8, linestyle="--")
            axes.annotate(f"HBM of {generation}", (1, limit), va="bottom", color=INK)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("devices")
        axes.set_title("GiB on each device; lines: formula, points: TPU compiler", loc="left")
        axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.15))
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def size_of(row: dict[str, Any]) -> Size:
    """The size that a row was compiled for, which may have fewer layers than the model."""
    return dataclasses.replace(SIZES[row["size"]], layers=row["layers"])


def measured(row: dict[str, Any]) -> int:
    """Arguments, outputs and temporaries less the aliases, of a compiled row."""
    memory: dict[str, int] = row["memory"]
    return memory["argument_bytes"] + memory["output_bytes"] - memory["alias_bytes"] + memory["temp_bytes"]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, for docs/aot.md."""
    names = (
        "model",
        "devices",
        "way",
        "arguments",
        "outputs",
        "aliases",
        "temporaries",
        "sum",
        "formula",
        "compiled in",
    )
    lines = [f"| {' | '.join(names)} |", "| --- | --- | --- |" + " ---: |" * 7]
    for row in rows:
        expected = total(size_of(row), row["devices"], row["topology"], row["way"] != "functional") / measured(row) - 1
        cells = [row["size"].upper(), f"{row['devices']} of {row['topology']}", row["way"]]
        cells += [f"{row['memory'][f'{kind}_bytes'] / MIB:,.1f}" for kind in ("argument", "output", "alias", "temp")]
        cells += [f"{measured(row) / MIB:,.1f}", f"{expected:+.1%}", f"{row['compile_seconds']:.0f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def savings(rows: list[dict[str, Any]]) -> str:
    """Sums with and without donation of each model, as Markdown, for docs/aot.md."""
    sums: dict[str, dict[str, float]] = {}
    for row in rows:
        case = f"{row['size'].upper()}, {row['devices']} of {row['topology']}"
        sums.setdefault(case, {})[row["way"]] = measured(row) / MIB
    lines = ["| MiB on each device | not donated | donated | saved | of it |", "| --- | ---: | ---: | ---: | ---: |"]
    for case, ways in sums.items():
        plain, donated = ways["functional"], ways["by-hand"]
        saved = plain - donated
        lines.append(f"| {case} | {plain:,.0f} | {donated:,.0f} | {saved:,.0f} | {saved / plain:.1%} |")
    return "\n".join(lines) + "\n"
