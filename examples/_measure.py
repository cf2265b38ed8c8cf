"""Measures the steps of a training loop from inside its process: time, resident memory, pointers, values."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
import torch_xla.core.xla_model as xm
from torch.utils import _pytree as pytree
from torch_xla import _XLAC

from torch_xla_donate import DonationReport

# The first steps compile, which takes extra memory and time.
WARM_UP = 2
_SAMPLE_SECONDS = 0.002


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of one run. All bytes are above the process's resident memory before the state was made.

    Attributes:
        losses: of each step, exact (`float.hex`).
        digest: SHA-256 of the whole state after the last step.
        state_tensors, state_bytes: of the state.
        seconds: of each step, from the trace to the end of the computation.
        peaks: highest resident memory during each step, in bytes.
        trace: resident memory over time, as pairs (step and fraction of it, bytes).
        kept: for each step, how many of the state's tensors are in the memory of a tensor of the state before.
        moves: of the last step: the tensor whose memory was taken -> the tensor that is in it now.
        report: text of the donation report of the last step.
        accuracy: on the test images, 0 to 1; None where there is none.
    """

    mode: str
    losses: list[str]
    digest: str
    state_tensors: int
    state_bytes: int
    seconds: list[float]
    peaks: list[int]
    trace: list[tuple[float, int]]
    kept: list[int]
    moves: dict[str, str]
    report: str
    accuracy: float | None

    @property
    def step_seconds(self) -> float:
        """Median time of a step, the first ones left out."""
        return median(self.seconds[WARM_UP:])

    @property
    def peak(self) -> int:
        """Highest resident memory in bytes, the first steps left out."""
        return max(self.peaks[WARM_UP:])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Result:
        return cls(**json.loads(path.read_text(encoding="utf-8")))


class Meter:
    """Watches a training loop; the loop calls `start`, then `step` and `note` for each step, then `result`."""

    def __init__(self, mode: str, steps: int) -> None:
        self._mode = mode
        self._steps = steps
        self._before = _memory("VmRSS")
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._peaks: list[int] = []
        self._trace: list[tuple[float, int]] = []
        self._places: list[dict[str, int]] = []

    def start(self, state: object) -> None:
        """To be called when the state exists."""
        xm.wait_device_ops()
        self._places.append(_places(state))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Times the block and the computation it starts, and watches the memory meanwhile."""
        peak_is_ours = _reset_peak()
        samples: list[tuple[float, int]] = []
        done = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(samples, done))
        sampler.start()
        start = time.perf_counter()
        try:
            yield
            xm.wait_device_ops()
        finally:
            seconds = time.perf_counter() - start
            done.set()
            sampler.join()
        self._trace += [(len(self._seconds) + (when - start) / seconds, used) for when, used in samples]
        self._seconds.append(seconds)
        # Both sources: the kernel's own peak misses nothing, but not every kernel lets a process reset it.
        highest = max(used for _, used in samples)
        self._peaks.append(max(highest, _memory("VmHWM") - self._before) if peak_is_ours else highest)

    def note(self, state: object, loss: torch.Tensor) -> None:
        """Records what the step has left behind, and prints a line."""
        self._places.append(_places(state))
        self._losses.append(loss.item())
        number = len(self._losses)
        print(
            f"{self._mode:>7} step {number:2d}/{self._steps}  loss {self._losses[-1]:.4f}"
            f"  {self._seconds[-1] * 1000:5.0f} ms  peak {self._peaks[-1] / 2**20:5.0f} MiB",
            flush=True,
        )

    def finish(self, state: object, report: DonationReport, result: Path | None) -> None:
        """Saves what there is to know to a file; without one, prints the report if anything was donated."""
        if result is not None:
            self.result(state, report).save(result)
        elif report.donors:
            print(report)

    def result(self, state: object, report: DonationReport, accuracy: float | None = None) -> Result:
        """All there is to know about the run; `state` is the last one."""
        tensors = _named(state)
        digest = hashlib.sha256()
        for tensor in tensors.values():
            digest.update(tensor.cpu().numpy())
        kept = [len({*old.values()} & {*new.values()}) for old, new in pairwise(self._places)]
        owners = {pointer: name for name, pointer in self._places[-2].items()}
        return Result(
            mode=self._mode,
            losses=[loss.hex() for loss in self._losses],
            digest=digest.hexdigest(),
            state_tensors=len(tensors),
            state_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            seconds=self._seconds,
            peaks=self._peaks,
            trace=self._trace,
            kept=kept,
            moves={owners[at]: name for name, at in self._places[-1].items() if at in owners},
            report=str(report),
            accuracy=accuracy,
        )

    def _sample(self, samples: list[tuple[float, int]], done: threading.Event) -> None:
        while True:
            samples.append((time.perf_counter(), _memory("VmRSS") - self._before))
            if done.wait(_SAMPLE_SECONDS):
                return


def _named(state: object) -> Mapping[str, torch.Tensor]:
    leaves, _ = pytree.tree_flatten_with_path(state)
    return {pytree.keystr(path): leaf for path, leaf in leaves}


def _places(state: object) -> dict[str, int]:
    """The address of each tensor. Only a private function of torch_xla has it, on CPU and GPU."""
    return {name: _XLAC._unsafe_buffer_pointer(tensor) for name, tensor in _named(state).items()}


def _memory(field: str) -> int:
    """Resident memory of this process in bytes: `VmRSS` now, `VmHWM` the highest since the last reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None, f"no {field} in /proc/self/status"
    return int(found[1]) * 1024


def _reset_peak() -> bool:
    """Makes `VmHWM` start again from now. False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True
