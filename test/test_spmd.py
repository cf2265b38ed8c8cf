"""SPMD on 4 and 8 devices: what is predicted before a step, what its HLO says, what became of the buffers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
from helpers import dump_env, run_script

from torch_xla_donate import hlo

DEVICES = (4, 8)
# The mesh has 2 x 2 or 2 x 4 devices. Each dimension of the array is cut along these axes.
SPECS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rows": (("a", "b"), ()),
    "columns": ((), ("a", "b")),
    "whole": ((), ()),
    "tiles": (("a",), ("b",)),
    "half": (("a",), ()),  # on two halves of the devices
}
# For an output also None: nobody gives it a sharding, the compiler chooses.
KNOWN = [*itertools.product(SPECS, SPECS)]
INFERRED = [(donor, None) for donor in SPECS if donor != "whole"]
ALONE = [("rows", "rows"), ("rows", None), ("half", "half"), ("half", "rows"), ("whole", "tiles"), ("columns", "half")]
EVEN, UNEVEN = (8, 16), (6, 5)  # and odd multiples, which all of the shardings divide evenly, and which most do not

PRELUDE = """
    import json, sys
    import numpy as np, torch, torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs, torch_xla.runtime as xr
    from torch_xla import _XLAC
    from torch_xla_donate import DonatedBufferError, compile, donate_buffer, donation_report, is_donated, _C

    xr.use_spmd()
    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(count), (2, count // 2), ("a", "b"))

    def values(*shape, dtype=torch.float32):
        return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)

    def shard(t, spec):
        if spec is not None:
            xs.mark_sharding(t, mesh, tuple(tuple(axes) or None for axes in spec))
        return t

    def make(shape, spec=None, dtype=torch.float32):
        t = shard(values(*shape, dtype=dtype).to("xla"), spec)
        torch_xla.sync(wait=True)
        return t

    ROWS, COLUMNS, WHOLE = ("ab", ""), ("", "ab"), ("", "")
"""


def run(body: str, *args: str, devices: int = 4, folder: Path | None = None) -> Any:
    """Runs the body on virtual devices; what it has printed as its last line, from JSON."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    env = {"XLA_FLAGS": flag} if folder is None else dump_env(folder, flag)
    source = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
    done = run_script(source, *args, env={**env, "CPU_NUM_DEVICES": str(devices)}, timeout=240)
    return json.loads(done.stdout.splitlines()[-1])


# --- All pairs ---

ALL_PAIRS = """
    import warnings

    warnings.simplefilter("ignore")  # of the donations that are unusable, as they should be
    results = []
    for step in json.loads(sys.argv[1]):
        made = [make(shape, donor) for shape, donor, *_ in step]
        outputs = [
            shard((x * 2 + 1).to(getattr(torch, dtype)), output) for x, (*_, output, dtype) in zip(made, step)
        ]
        donate_buffer(made)
        marks = {mark.name: mark for mark in donation_report(predict=True).pending}
        torch_xla.sync(wait=True)
        donors = {donor.name: donor for donor in donation_report(steps=1).donors}
        for index, (x, y, (shape, *_, dtype)) in enumerate(zip(made, outputs, step)):
            mark, donor = marks[f"[{index}]"], donors[f"[{index}]"]
            results.append({
                "prediction": mark.prediction,
                "prediction_reason": mark.reason,
                "bytes": [mark.bytes_per_device, donor.bytes_per_device],
                "sharding": [mark.sharding, donor.sharding],
                "outcome": donor.outcome,
                "reason": donor.reason,
                "has_value": _C.has_value(x),
                "is_donated": is_donated(x),
                "right": torch.equal(y.cpu(), (values(*shape) * 2 + 1).to(getattr(torch, dtype))),
                "kept": is_donated(x) or torch.equal(x.cpu(), values(*shape)),
            })
    print(json.dumps(results))
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A donor and the output that is made of it, both of this shape."""

    devices: int
    shape: tuple[int, int]
    donor: str
    output: str | None
    dtype: str = "float32"
    alone: bool = False  # the only output of its step

    def __str__(self) -> str:
        alone = ", alone" if self.alone else ""
        return f"{self.devices}: {self.donor} to {self.output}, {self.dtype}{list(self.shape)}{alone}"

    @property
    def donor_bytes(self) -> int:
        """Of the largest piece: XLA pads the others."""
        return self._bytes(self.donor, 4)

    @property
    def output_bytes(self) -> int:
        """XLA keeps the only output of a step whole if its sharding does not cut it evenly."""
        spec = self.output or self.donor
        whole = self.alone and not self.is_even(spec)
        return self._bytes("whole" if whole else spec, 2 if self.dtype == "float16" else 4)

    def is_even(self, spec: str) -> bool:
        return all(size % cut == 0 for size, cut in zip(self.shape, self._pieces(spec)))

    def _pieces(self, spec: str) -> list[int]:
        axes = {"a": 2, "b": self.devices // 2}
        return [math.prod(axes[axis] for axis in dimension) for dimension in SPECS[spec]]

    def _bytes(self, spec: str, itemsize: int) -> int:
        return itemsize * math.prod(-(-size // cut) for size, cut in zip(self.shape, self._pieces(spec)))


def side_by_side(devices: int, pairs: list[tuple[Any, ...]]) -> list[Case]:
    """Cases for one step: their shapes are such that a donor has the size of no output but perhaps its own."""
    cases: list[Case] = []
    taken: set[int] = set()
    factors = itertools.count(1, 2)
    for base, *pair in pairs:
        for factor in factors:
            case = Case(devices, (base[0], base[1] * factor), *pair)
            sizes = {case.donor_bytes, case.output_bytes}
            if not sizes & taken:
                taken |= sizes
                cases.append(case)
                break
    return cases


def steps(devices: int) -> list[list[Case]]:
    some = [("rows", "columns"), ("rows", "whole"), ("tiles", "tiles"), ("whole", "whole"), ("half", "rows")]
    others = [(EVEN, *pair, dtype) for pair in some for dtype in ("int32", "float16")]
    return [
        side_by_side(devices, [(EVEN, *pair) for pair in KNOWN] + others),
        side_by_side(devices, [(UNEVEN, *pair) for pair in KNOWN]),
        side_by_side(devices, [(EVEN, *pair) for pair in INFERRED]),
        side_by_side(devices, [(UNEVEN, *pair) for pair in INFERRED]),
        side_by_side(devices, [(EVEN, "whole", None), (UNEVEN, "whole", None)]),  # where nothing is sharded
        *[[Case(devices, UNEVEN, *pair, alone=True)] for pair in ALONE],
    ]


CASES = [case for devices in DEVICES for step in steps(devices) for case in step]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Any, hlo.DumpedModule]]:
    """Of each case: what was predicted and what happened, and the module of its step."""
    found = {}
    for devices in DEVICES:
        folder = tmp_path_factory.mktemp(f"pairs{devices}")
        planned = [
            [(c.shape, SPECS[c.donor], c.output and SPECS[c.output], c.dtype) for c in s] for s in steps(devices)
        ]
        results = iter(run(ALL_PAIRS, json.dumps(planned), devices=devices, folder=folder))
        modules = [module for module in hlo.read_dump(folder) if module.donors]
        assert len(modules) == len(planned)
        for step, module in zip(steps(devices), modules):
            assert len(module.donors) == len(step)
            found.update({case: (next(results), module) for case in step})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("donor", SPECS)
@pytest.mark.parametrize("devices", DEVICES)
def test_the_prediction_the_hlo_and_the_buffer_agree(measured: Any, devices: int, donor: str) -> None:
    cases = [case for case in measured if (case.devices, case.donor) == (devices, donor)]
    assert len(cases) > 12
    for case in cases:
        result, module = measured[case]
        # GIVEN what each device holds of the donor
        assert result["bytes"] == [case.donor_bytes] * 2, case
        assert case.donor_bytes in [module.shape_of(donor).bytes for donor in module.donors], case
        # THEN the step did what the HLO after optimisation says, and the report says the same
        used = case.donor_bytes in [module.shape_of(alias).bytes for alias in module.aliases]
        assert (result["outcome"] == "donated") is result["is_donated"] is (not result["has_value"]) is used, case
        assert result["right"], case
        assert result["kept"], case
        # ... which follows from the bytes
        assert used is (case.donor_bytes == case.output_bytes), case
        # ... and was predicted, where all shardings are known
        if case.output is None and case.donor != "whole":
            assert result["prediction"] == "unknown", case
            assert "; the compiler will choose the sharding of f32[" in result["prediction_reason"], case
        else:
            assert result["prediction"] == ("donated" if used else "unusable"), case


@pytest.mark.slow
def test_the_reason_names_the_shardings(measured: Any) -> None:
    reasons = 0
    for case, (result, _) in measured.items():
        reason, size = result["reason"], case.donor_bytes
        if result["outcome"] == "donated":
            assert reason == ""
        elif case.dtype == "float16":
            assert reason.startswith(f"no output of the step has its size of {size} bytes on each device (outputs: ")
        else:
            reasons += 1
            assert reason.startswith(
                f"an output has its size of {4 * math.prod(case.shape)} bytes, but not per device: "
                f"the donor is sharded {result['sharding'][1]}, {size} bytes on each device, the output f32["
                if case.dtype == "float32"
                else "an output has"
            )
            whole = case.alone and not case.is_even(case.donor) and case.output != "half"
            assert reason.endswith(
                "do not divide it evenly: pad the array" if whole else "shard donor and output alike"
            )
            if case.output is not None:
                assert result["prediction_reason"].endswith(f"; the next one will not use it: {reason}")
    assert reasons > 40
