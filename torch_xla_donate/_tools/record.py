"""The record that a program writes for `verify`: facts that XLA's dump does not have.

Each process has a folder with its dump and `record.jsonl`. A line of the record is one of

- ``{"executable": 1, "header": ..., "memory": ...}``: a graph runs for the first time. The header is the first line of
  its optimised HLO, by which `verify` finds it in the dump.
- ``{"run": 1, "site": "train.py:12"}``: a run of that executable begins.
- ``{"donors_of": 1, "donors": [...]}``: its donors that this package offered or refused, known after the run began.

Lines are appended as the runs begin, so that the record survives the end of the process.

With `verify --advise` a process also has `advice.json`: whether it saw steps, and its hints; ``null`` until it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_xla_donate import _C, _frames, _host
from torch_xla_donate._modes.debug import listen
from torch_xla_donate._report import sentence
from torch_xla_donate._tools.step_watch import StepWatch

NAME = "record.jsonl"
ADVICE = "advice.json"
# The folder of the first process.
MAIN = "main"
_TRIES = 3  # to find the donors of an executable; each waits for the device
_DUMP_FOLDER = re.compile(r"--xla_dump_to=\S*")


class _Record:
    """The record of this process.

    root, name, advises: as for `start`.
    watch: watches the steps for their advice; None without advice.
    children: the numbers of child processes.
    flags: XLA_FLAGS as they were; None once they are restored.
    tries: how often it has looked for the donors of each executable; `_TRIES` if they are written.
    last_step: number of the last step whose donors are written.
    """

    def __init__(self, root: Path, name: str, advises: bool) -> None:
        self.root, self.name, self.advises = root, name, advises
        self.children = itertools.count(1)
        self.folder = folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        self.watch = StepWatch() if advises else None
        self._write_advice(None)
        self.flags = os.environ.get("XLA_FLAGS", "")
        # One process may not write to the folder of another one, where modules of the same number would clash.
        others = _DUMP_FOLDER.sub("", self.flags)
        os.environ["XLA_FLAGS"] = f"{others} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()
        self.is_dumping = False
        self.file = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.tries: Counter[int] = Counter()
        self.last_step = 0

    def write(self, line: Mapping[str, Any]) -> None:
        # One call, so that lines of several threads do not mix.
        os.write(self.file, json.dumps(line).encode() + b"\n")

    def _write_advice(self, advice: Mapping[str, Any] | None) -> None:
        if self.watch is not None:
            part = self.folder / "advice.part"
            part.write_text(json.dumps(advice), encoding="utf-8")
            os.replace(part, self.folder / ADVICE)

    def finish(self) -> None:
        if self.watch is not None:
            try:
                advice = self.watch.advice().to_dict()
                self._write_advice({"saw_steps": self.watch.saw_steps(), **advice})
            except Exception as error:  # the program's own exception counts
                self._write_advice({"error": f"{type(error).__name__}: {error}"})

    def add(self, run: _C._Run) -> None:
        if not self.is_dumping:
            self.is_dumping = True
            os.environ["XLA_FLAGS"] = self.flags  # XLA has read them; other programs must not dump here
        number = run["executable"]
        if run["header"]:
            self.write({"executable": number, "header": run["header"], "memory": run["memory"]})
        self.write({"run": number, "site": _frames.site_of(run["stack"])})
        if run["has_donors"] and self.tries[number] < _TRIES:
            self._describe_donors(number, run["graph"])

    def _describe_donors(self, number: int, graph: str) -> None:
        self.tries[number] += 1
        _C.wait_for_steps()  # a step's donors can be read when it has ended
        # Steps whose donors were all refused have no graph, so the last one counts.
        steps = [step for step in _C.steps() if step["graph"] == graph and (graph or step["number"] > self.last_step)]
        if steps:
            self.last_step = steps[-1]["number"]
            self.tries[number] = _TRIES
            self.write({"donors_of": number, "donors": [_describe(raw) for raw in steps[-1]["donors"]]})


_record: _Record | None = None


def start(root: Path, name: str, advises: bool = False) -> None:
    """Records the runs of this process from now on, and lets XLA dump its modules.

    Call it before the XLA runtime starts, which reads XLA_FLAGS. A forked process calls it again.

    Args:
        root: the folder of all processes.
        name: the name of this process's folder in it.
        advises: whether to note what the steps could still donate.
    """
    global _record
    before, _record = _record, None
    if before is not None:
        os.close(before.file)
        os.environ["XLA_FLAGS"] = before.flags
    _record = _Record(root, name, advises)
    if before is None:
        _C.log_runs(record_runs)
        atexit.register(finish)
        if advises:
            listen(_note)


def child() -> tuple[Path, str, bool] | None:
    """The arguments of `start` for the next child process that this process starts; None without a record."""
    if _record is None:
        return None
    parent = "process" if _record.name == MAIN else _record.name
    return _record.root, f"{parent}_{next(_record.children)}", _record.advises


def order(name: str) -> list[int]:
    """Sorts the names of processes: the program, then its child processes as they were started."""
    return [int(number) for number in re.findall(r"\d+", name)]


def _note(step: _C.WatchedStep) -> None:
    # The search on one thread would hold old values of the others, so that their steps would differ at random.
    if _record is not None and _record.watch is not None and _host.default_device_number() == 0:
        _record.watch.note(step)


def finish() -> None:
    """Writes the runs that have begun, and the advice. A process calls it when it ends."""
    record_runs()
    if _record is not None:
        with contextlib.suppress(OSError):  # such as a full disk
            _record.finish()


def record_runs() -> None:
    """Writes the runs that have begun."""
    if _record is not None:
        try:
            for run in _C.take_runs():
                _record.add(run)
        except Exception as error:  # the program must not depend on its record, as on a full disk
            _C.note_error(f"verify: {type(error).__name__}: {error}")


def _describe(raw: _C._Donor) -> dict[str, Any]:
    return {
        "parameter": -1 if raw["parameter"] is None else raw["parameter"],
        "array": raw["array"],
        "bytes": raw["bytes_per_device"],
        "kind": "automatic" if raw["automatic"] else "marked",
        "name": raw["name"],
        "where": raw["where"],
        "reason": sentence(raw["reason"]),
    }
