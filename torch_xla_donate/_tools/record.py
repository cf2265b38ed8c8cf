"""The record that a program writes for `verify`: facts that XLA's dump does not have.

Each process has a folder with its dump and `record.jsonl`. A line of the record is one of

- ``{"executable": 1, "header": ..., "memory": ...}``: a graph runs for the first time. The header is the first line of
  its optimised HLO, by which `verify` finds it in the dump.
- ``{"run": 1, "site": "train.py:12"}``: a run of that executable begins.
- ``{"donors_of": 1, "donors": [...]}``: its donors that this package offered or refused, known after the run began.

Lines are appended as the runs begin, so that the record survives the end of the process.
"""

from __future__ import annotations

import atexit
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_xla_donate import _C, _frames
from torch_xla_donate._report import sentence

NAME = "record.jsonl"
_TRIES = 3  # to find the donors of an executable; each waits for the device
_DUMP_FOLDER = re.compile(r"--xla_dump_to=\S*")


class _Record:
    """The record of this process.

    root: as for `start`.
    flags: XLA_FLAGS as they were.
    path: of the file.
    tries: how often it has looked for the donors of each executable; `_TRIES` if they are written.
    last_step: number of the last step whose donors are written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        folder = _new_folder(root)
        self.flags = os.environ.get("XLA_FLAGS", "")
        # One process may not write to the folder of another one, where modules of the same number would clash.
        others = _DUMP_FOLDER.sub("", self.flags)
        os.environ["XLA_FLAGS"] = f"{others} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()
        self.is_dumping = False
        self.path = folder.resolve() / NAME
        self.path.touch()
        self.tries: Counter[int] = Counter()
        self.last_step = 0

    def write(self, line: Mapping[str, Any]) -> None:
        # Not a file that stays open: a program may close all of them, as one that becomes a daemon does. One call, so
        # that lines of several threads do not mix.
        with open(self.path, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

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


def start(root: Path | None) -> None:
    """Records the runs of this process from now on, and lets XLA dump its modules.

    Call it before the XLA runtime starts, which reads XLA_FLAGS. A forked process calls it again.

    Args:
        root: the folder of all processes; None records nothing.
    """
    global _record
    if root is None:
        return
    before, _record = _record, None
    if before is not None:
        os.environ["XLA_FLAGS"] = before.flags
    _record = _Record(root)
    if before is None:
        _C.log_runs(record_runs)
        atexit.register(record_runs)


def recorded_root() -> Path | None:
    """The folder of all processes; None without a record."""
    return None if _record is None else _record.root


def _new_folder(root: Path) -> Path:
    """A folder for this process: `main` for the program, then `process_1` and so on, in the order of the starts."""
    root.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        folder = root / (f"process_{number}" if number else "main")
        try:
            folder.mkdir()
            return folder
        except FileExistsError:  # of another process, which may begin at the same time
            number += 1


def record_runs() -> None:
    """Writes the runs that have begun. A process also calls it when it ends."""
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
