"""Joins the dumps and the records of a program's processes into a `RunSummary`."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_xla_donate import hlo
from torch_xla_donate._errors import see
from torch_xla_donate._tools import record
from torch_xla_donate._tools.dump import DumpedStep, ModuleText, read_steps, signature_of, summarize
from torch_xla_donate._tools.summary import RunSummary, SkippedFile, StepDonor, StepSummary
from torch_xla_donate.hlo.dump import texts_in
from torch_xla_donate.hlo.outcomes import read_statistics

_DUMP = f'Give a folder that XLA dumped to, with XLA_FLAGS="--xla_dump_to=DIR --xla_dump_hlo_as_text". {see("verify")}'


@dataclasses.dataclass
class _Executable:
    """A graph of a process's record."""

    signature: int
    memory: hlo.MemoryAnalysis | None
    donors: list[StepDonor] = dataclasses.field(default_factory=list)
    sites: Counter[str] = dataclasses.field(default_factory=Counter)


class _Process:
    """The record of a process."""

    def __init__(self, path: Path) -> None:
        self.executables: dict[int, _Executable] = {}
        runs: list[tuple[int, str]] = []
        donors_of: dict[int, list[StepDonor]] = {}
        for line in _lines(path):
            if "executable" in line:
                found = _Executable(signature_of(hlo.parse(line["header"])), read_statistics(line["memory"]))
                self.executables[line["executable"]] = found
            elif "run" in line:
                runs.append((line["run"], line["site"]))
            else:
                donors_of[line["donors_of"]] = [StepDonor(**donor) for donor in line["donors"]]
        # Another thread may run a graph before the line that describes it.
        for number, site in runs:
            if number in self.executables:
                self.executables[number].sites[site] += 1
        for number in donors_of.keys() & self.executables.keys():
            self.executables[number].donors = donors_of[number]
        self._waiting: dict[int, deque[_Executable]] = {}
        for executable in self.executables.values():
            self._waiting.setdefault(executable.signature, deque()).append(executable)

    def take(self, signature: int) -> _Executable | None:
        """The executable of a module, called in the order of the modules.

        The order distinguishes graphs of one signature, because torch_xla compiles a graph when it first runs.
        """
        waiting = self._waiting.get(signature)
        return waiting.popleft() if waiting else None


class _Steps:
    """The distinct steps of all processes."""

    def __init__(self) -> None:
        self.summaries: list[StepSummary] = []
        self.befores: list[Path | None] = []
        self._sites: list[Counter[str]] = []
        self._place_of: dict[bytes, int] = {}

    def add(self, module: DumpedStep, process: _Process | None) -> None:
        executable = None if process is None else process.take(module.signature)
        place = self._place_of.setdefault(module.digest, len(self.summaries))
        if place == len(self.summaries):
            self.summaries.append(module.summary)
            self.befores.append(module.before)
            self._sites.append(Counter())
        if process is None:
            return
        step = self.summaries[place]
        self.summaries[place] = step = dataclasses.replace(step, executed=step.executed or 0)
        if executable is None:
            return
        sites = self._sites[place]
        sites.update(executable.sites)
        self.summaries[place] = dataclasses.replace(
            step,
            donors=step.donors if step.executed else _with_kinds(step.donors, executable.donors),
            memory=executable.memory or step.memory,
            executed=sites.total(),
            sites=tuple(site for site, _ in sites.most_common() if site),
        )


def folders_of(folder: Path) -> list[Path]:
    """The folders of processes in a folder of `verify`, in the order of their starts; else the folder itself.

    Raises FileNotFoundError if the folder does not exist.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder. {_DUMP}")
    found = [path.parent for path in folder.glob(f"*/{record.NAME}")]
    return sorted(found, key=lambda path: (len(path.name), path.name)) or [folder]  # process_10 after process_2


def collect(
    folder: Path,
    source: str,
    *,
    topology: str = "",
    undonated: bool = False,
    exit_code: int | None = None,
) -> RunSummary:
    """The steps of a dump, with what their records say if it is a dump of `verify`.

    Args:
        folder: as for `folders_of`.
        source: for `RunSummary.source`.
        topology: a TPU topology to compile each distinct step for; empty for none.
        undonated: whether to compile each distinct step for CPU with and without donation, for its memory.
        exit_code: for `RunSummary.exit_code`.

    Raises:
        FileNotFoundError: the folder does not exist or, without `exit_code`, has no module.
        ImportError, ValueError: as for `hlo.compile_for`.
    """
    steps = _Steps()
    skipped: list[SkippedFile] = []
    dumps = [(one, texts_in(one)) for one in folders_of(folder)]
    if exit_code is None and not any(texts for _, texts in dumps):
        raise FileNotFoundError(
            f"folder {folder} has no module_*.before_optimizations.txt and no module_*after_optimizations.txt. {_DUMP}"
        )
    for one, texts in dumps:
        process = _read(one / record.NAME, skipped)
        for files in texts:
            for module in read_steps(files, skipped):
                steps.add(module, process)
    if topology or undonated:
        _compile(steps, topology, undonated, skipped)
    return RunSummary(source, tuple(steps.summaries), tuple(skipped), exit_code)


def _read(path: Path, skipped: list[SkippedFile]) -> _Process | None:
    """A record that `verify` wrote; None if there is none, or if another program or version wrote it."""
    try:
        return _Process(path) if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        skipped.append(SkippedFile(str(path), f"this version cannot read it: {type(error).__name__}: {error}"))
        return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # a killed process may leave half a line
                yield json.loads(line)


def _with_kinds(dumped: tuple[StepDonor, ...], recorded: list[StepDonor]) -> tuple[StepDonor, ...]:
    """The donors of a dump with kind, name and line. torch_xla donates those that are not in the record."""
    by_number = {donor.parameter: donor for donor in recorded if donor.parameter >= 0}
    found = []
    for donor in dumped:
        known = by_number.pop(donor.parameter, None)
        if known is None:
            found.append(dataclasses.replace(donor, kind="torch_xla"))
        else:
            reason = "" if donor.output is not None else known.reason or donor.reason
            found.append(dataclasses.replace(donor, kind=known.kind, name=known.name, where=known.where, reason=reason))
    refused = [donor for donor in recorded if donor.parameter < 0 or donor.parameter in by_number]
    return (*found, *(dataclasses.replace(donor, parameter=-1) for donor in refused))


def _compile(steps: _Steps, topology: str, undonated: bool, skipped: list[SkippedFile]) -> None:
    for place, before in enumerate(steps.befores):
        if before is not None:
            try:
                step = steps.summaries[place]
                if undonated:
                    module = hlo.compile_for(before, "cpu", undonated=True)  # both counted by one compiler
                    step = dataclasses.replace(step, memory=module.memory, undonated=module.undonated)
                    steps.summaries[place] = step
                if topology:
                    on_topology = _on_topology(step, hlo.compile_for(before, topology))
                    steps.summaries[place] = dataclasses.replace(step, on_topology=on_topology)
            except RuntimeError as error:  # such as too little memory on a device
                skipped.append(SkippedFile(str(before), str(error).partition("\n")[0]))


def _on_topology(step: StepSummary, compiled: hlo.TopologyModule) -> StepSummary:
    """The same step, compiled for a topology."""
    there = summarize(ModuleText(compiled.before, ""), ModuleText(compiled.after, ""))
    known = {donor.parameter: donor for donor in step.donors}
    donors = []
    for donor in there.donors:
        here = known.get(donor.parameter, donor)  # CPU may have compiled the module otherwise
        donors.append(dataclasses.replace(donor, kind=here.kind, name=here.name, where=here.where))
    return dataclasses.replace(
        step,
        file="",
        donors=tuple(donors),
        aliases=there.aliases,
        memory=compiled.memory,
        undonated=None,
        topology=compiled.topology,
    )
