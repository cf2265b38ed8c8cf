"""The size that this package expects of an array on a TPU, against the TPU compiler's own answer."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import needs_jax

from torch_xla_donate import _C, _host

DTYPES = (
    "f32",
    "s32",
    "bf16",
    "f16",
    "s64",
    "s16",
    "s8",
    "u8",
    "pred",
    "f8e4m3fn",
    "f8e5m2",
    "u16",
    "u32",
    "u64",
    "f64",
)
PROGRAM = Path(__file__).with_name("compile_pairs.py")


def random_array(rng: random.Random) -> str:
    def size() -> int:
        return rng.choice([rng.randint(1, 40), rng.choice([1, 2, 8, 16, 64, 128, 256, 1024]), rng.randint(1, 1500)])

    while True:
        sizes = [size() for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4]))]
        if math.prod(sizes) <= 4_000_000:
            return f"{rng.choice(DTYPES)}[{','.join(map(str, sizes))}]"


def random_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """A third of equal sizes on the TPU, a third of equal bytes, a third of any two arrays."""
    rng = random.Random(seed)
    arrays = [random_array(rng) for _ in range(6000)]
    pairs = []
    for number in range(count):
        first, second = rng.choice(arrays), rng.choice(arrays)
        measure = (_C.size_on_device, _C.bytes_per_device)[number % 3] if number % 3 < 2 else None
        if measure is not None:
            alike = [one for one in arrays if measure(one) == measure(first) and one != first]
            second = rng.choice(alike) if alike else second
        pairs.append((first, second))
    return pairs


@needs_jax
@pytest.mark.parametrize(
    ("topology", "platform"),
    [
        ("v6e:1x1", "tpu"),
        ("v5e:1x1", "tpu"),
        ("v5p:2x2x1", "tpu"),
        ("v4:2x2x1", "tpu"),
        ("v3:2x2", "tpu before v4"),
        ("v2:2x2", "tpu before v4"),
    ],
)
def test_the_tpu_compiler_pairs_by_the_sizes_that_we_expect(topology: str, platform: str) -> None:
    with _host.size_rule(platform):
        pairs = random_pairs(300, seed=20261122)
        sizes = [[_C.size_on_device(donor), _C.size_on_device(output)] for donor, output in pairs]
    child = subprocess.run(
        [sys.executable, str(PROGRAM), topology],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout.splitlines()[-1])
    expected = [{"aliased": donor == output, "sizes": [donor, output]} for donor, output in sizes]
    wrong = [(pair, want, got) for pair, want, got in zip(pairs, expected, found) if want != got]
    assert wrong == []
    assert 60 < sum(one["aliased"] for one in found) < 240  # both answers occur
