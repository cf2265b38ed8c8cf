"""The record that a program writes for `verify`: facts that XLA's dump does not have.

Each process has a folder with its dump and `record.jsonl`. A line of the record is one of

- ``{"executable": 1, "header": ..., "memory": ...}``: a graph runs for the first time. The header is the first line of
  its optimised HLO, by which `verify` finds it in the dump.
- ``{"run": 1, "site": "train.py:12", "live": 1024}``: a run of that executable begins.
- ``{"donors_of": 1, "donors": [...]}``: its donors that this package offered or refused, known after the run began.

Lines are appended as the runs begin, so that the record survives the end of the process.

`advice.json` is beside the record of the first process, if `verify --advise` started the program and nothing killed it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_xla_donate import _C, _frames
from torch_xla_donate._report import sentence
from torch_xla_donate._tools.recorder import Recorder

NAME = "record.jsonl"
ADVICE = "advice.json"
# The folder of the first process.
MAIN = "main"
_TRIES = 3  # to find the donors of an executable; each waits for the device
_DUMP_FOLDER = re.compile(r"--xla_dump_to=\S*")


class _Record:
    """The record of this process.

    root: the folder of all processes.
    flags: XLA_FLAGS as they were; None once they are restored.
    tries: how often it has looked for the donors of each executable; `_TRIES` if they are written.
    last_step: number of the last step whose donors are written.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
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

    def add(self, run: Mapping[str, Any]) -> None:
        if not self.is_dumping:
            self.is_dumping = True
            os.environ["XLA_FLAGS"] = self.flags  # XLA has read them; other programs must not dump here
        number = run["executable"]
        if run["header"]:
            self.write({"executable": number, "header": run["header"], "memory": run["memory"]})
        self.write({"run": number, "site": _site(run["stack"]), "live": run["live_bytes"]})
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


def start(root: Path, name: str) -> None:
    """Records the runs of this process from now on, and lets XLA dump its modules.

    Call it before the XLA runtime starts, which reads XLA_FLAGS. A forked process calls it again.

    Args:
        root: the folder of all processes.
        name: the name of this process's folder in it.
    """
    global _record
    is_first = _record is None
    if _record is not None:
        os.close(_record.file)
        os.environ["XLA_FLAGS"] = _record.flags
    _record = _Record(root, name)
    if is_first:
        _C.log_runs(record_runs)
        atexit.register(record_runs)


@contextlib.contextmanager
def advice_noted(root: Path) -> Iterator[None]:
    """Writes what the steps inside could still donate."""
    recorder, process = Recorder(), os.getpid()
    try:
        with recorder:
            yield
    finally:
        if os.getpid() == process:  # a forked process ends here, too
            with contextlib.suppress(Exception):  # the program's own exception counts
                text = json.dumps(recorder.advice().to_dict())
                (root / MAIN / "advice.part").write_text(text, encoding="utf-8")
                os.replace(root / MAIN / "advice.part", root / MAIN / ADVICE)


def root() -> Path | None:
    """The folder of all processes; None without a record."""
    return None if _record is None else _record.root


def record_runs() -> None:
    """Writes the runs that have begun."""
    if _record is not None:
        try:
            for run in _C.take_runs():
                _record.add(run)
        except Exception as error:  # the program must not depend on its record, as on a full disk
            _C.note_error(f"verify: {type(error).__name__}: {error}")


def _site(stack: Sequence[tuple[str, str, int]]) -> str:
    """``file:line`` of the innermost user frame; empty if there is none."""
    found = next((frame for frame in stack if not _frames.is_internal_code(frame[0], frame[1])), None)
    return "" if found is None else f"{found[1]}:{found[2]}"


def _describe(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "parameter": -1 if raw["parameter"] is None else raw["parameter"],
        "array": raw["array"],
        "bytes": raw["bytes_per_device"],
        "kind": "automatic" if raw["automatic"] else "marked",
        "name": raw["name"],
        "where": raw["where"],
        "reason": sentence(raw["reason"]),
    }
