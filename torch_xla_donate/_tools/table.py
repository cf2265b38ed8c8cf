"""Shows a `RunSummary` on a terminal: a table for each distinct step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from torch_xla_donate._text import cut, percent, plural, size
from torch_xla_donate._tools.summary import Kind, RunSummary, StepDonor, StepSummary

# So that a dump of thousands of modules stays readable. `--json` has everything.
_STEPS = 40
_DONORS = 40
_SITES = 3
_NAMES = 3
# Temporaries that grow by less than this share of the aliased bytes are not worth a sentence.
_NOTABLE = 0.1
_FULL = 0.9


def tables(run: RunSummary) -> Iterator[RenderableType]:
    """The parts to print for a run, in order. Steps with donors have a table each, the others a line.

    Steps of a program with the same lines, numbers of arrays and donors are shown once, with the memory of the first.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, step in enumerate(run.steps, start=1):
        there = step.on_topology.donors if step.on_topology is not None else None
        groups.setdefault((step.sites or number, step.parameters, step.outputs, step.donors, there), []).append(number)
    for numbers in list(groups.values())[:_STEPS]:
        step = run.steps[numbers[0] - 1]
        yield Text(_heading(numbers, run.steps), style="bold")
        yield Text(f"  {_arrays(step)}")
        if len(numbers) > 1:
            yield Text(f"  {plural(len(numbers), 'graph')} were compiled for it. Operations, shapes or numbers differ.")
        yield from (Text(f"  {line}") for line in (*_memory(step), *memory_notes(step)))
        if step.donors:
            yield _donors(step)
        yield ""
    if len(groups) > _STEPS:
        more = sum(map(len, list(groups.values())[_STEPS:]))
        yield Text(f"... and {plural(more, 'more step')}; --json has all.")
    for file in run.skipped:
        yield Text(f"skipped {file.file}: {file.reason}")
    yield Text(summary_line(run))


def summary_line(run: RunSummary) -> str:
    """The result in a line."""
    donated = sum(step.donated_bytes for step in run.steps)
    text = f"{plural(len(run.steps), 'distinct step')}"
    text += (
        f": {size(donated)} donated, {percent(run.donated_fraction)} of the bytes offered"
        if run.offered_bytes
        else ", no donors"
    )
    text += f"; {plural(len(run.skipped), 'file')} skipped" if run.skipped else ""
    if run.exit_code:
        ended = f"signal {-run.exit_code}" if run.exit_code < 0 else f"exit code {run.exit_code}"
        text += f"; the program ended with {ended}"
    return text


def _heading(numbers: Sequence[int], steps: Sequence[StepSummary]) -> str:
    step = steps[numbers[0] - 1]
    executed = [count for number in numbers if (count := steps[number - 1].executed) is not None]
    ran = f", ran {plural(sum(executed), 'time')}" if executed else ""
    sites = ", ".join(_short(site) for site in step.sites[:_SITES])
    more = ", ..." if len(step.sites) > _SITES else ""
    alike = f" and {len(numbers) - 1} alike" if len(numbers) > 1 else ""
    return f"Step {numbers[0]}{alike}: {step.module}{ran}{f' at {sites}{more}' if sites else ''}"


def _arrays(step: StepSummary) -> str:
    kinds = Counter(donor.kind for donor in step.donors)
    names = ", ".join(f"{kinds[kind]} {label}" for kind, label in _KINDS.items() if kinds[kind] and kind != "unknown")
    return (
        f"{plural(step.parameters, 'parameter')}, {plural(step.outputs, 'output')}, "
        f"{plural(len(step.donors), 'donor')}{f' ({names})' if names else ''}, "
        f"{plural(step.aliases, 'alias', 'aliases')}, {size(step.donated_bytes)} saved"
    )


_KINDS: dict[Kind, str] = {
    "marked": "marked",
    "automatic": "automatic",
    "torch_xla": "torch_xla's own",
    "unknown": "unknown",
}


def _memory(step: StepSummary) -> Iterator[str]:
    for found in (step, step.on_topology):
        if found is not None and found.memory is not None:
            memory = found.memory
            where = f" on {found.topology}" if found.topology else ""
            yield (
                f"peak{where} {size(memory.peak_bytes)} (in {size(memory.argument_bytes)}, out "
                f"{size(memory.output_bytes)}, temporary {size(memory.temp_bytes)}, aliased {size(memory.alias_bytes)})"
            )
        if found is not None and found.undonated is not None:
            yield f"peak without donation {size(found.undonated.peak_bytes)}"


def memory_notes(step: StepSummary) -> list[str]:
    """Sentences on memory that the aliases of a step do not save. Empty if they save all of it, or if it is unknown."""
    found = []
    copied = [donor for donor in step.donors if donor.copied_bytes]
    if copied:
        names = [donor.name or f"parameter {donor.parameter}" for donor in copied]
        shown = ", ".join(cut(names, _NAMES, "and {:,} more"))
        found.append(
            f"XLA copies {size(sum(donor.copied_bytes for donor in copied))} of donated arrays at each run "
            f"({shown}), because an operation reads the old value after XLA begins to write the new one."
        )
    memory, undonated = step.memory, step.undonated
    if memory is None or undonated is None:
        return found
    aliased = memory.alias_bytes - undonated.alias_bytes
    growth = memory.temp_bytes - undonated.temp_bytes
    if aliased <= 0 or growth < _NOTABLE * aliased:
        return found
    peaks = f"A run takes {size(memory.peak_bytes)} with donation and {size(undonated.peak_bytes)} without."
    if growth >= _FULL * aliased:
        found.append(
            f"Aliased, yet a full extra temporary copy: outputs reuse {size(aliased)} of donors, but the temporaries "
            f"grow by {size(growth)}. {peaks}"
        )
    else:
        found.append(
            f"Outputs reuse {size(aliased)} of donors, but the temporaries grow by {size(growth)}, because without "
            f"donation XLA keeps them in the memory of the outputs. {peaks}"
        )
    return found


def _donors(step: StepSummary) -> Table:
    table = Table()
    other = step.on_topology
    table.add_column("no.", justify="right", no_wrap=True)
    table.add_column("array", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("donor", overflow="fold")
    table.add_column("taken by", overflow="fold")
    there = {donor.parameter: donor for donor in other.donors} if other is not None else {}
    if other is not None:
        table.add_column(f"on {other.topology}", overflow="fold")

    def differs(donor: StepDonor) -> bool:  # an output takes the memory here only, or there only
        found = there.get(donor.parameter)
        return found is not None and (donor.output is None) != (found.output is None)

    # Differences first, then unusable donors, so that thousands of donated ones do not hide them.
    rows = sorted(step.donors, key=lambda donor: (not differs(donor), donor.output is not None))
    for donor in rows[:_DONORS]:
        row = ["" if donor.parameter < 0 else str(donor.parameter), donor.array, size(donor.bytes), _who(donor)]
        row.append(_outcome(donor))
        if other is not None:
            found = there.get(donor.parameter)
            row.append("not offered" if found is None else _outcome(found) + (" (differs)" if differs(donor) else ""))
        table.add_row(*row)
    if len(rows) > _DONORS:
        table.caption = f"... and {len(rows) - _DONORS} more; --json has all."
    return table


def _who(donor: StepDonor) -> str:
    where = f" ({_short(donor.where)})" if donor.where else ""
    return f"{_KINDS[donor.kind]}{f' {donor.name}' if donor.name else ''}{where}"


def _outcome(donor: StepDonor) -> str:
    copied = f", {size(donor.copied_bytes)} copied first" if donor.copied_bytes else ""
    return f"none: {donor.reason}" if donor.output is None else f"output {donor.output}{copied}"


def _short(site: str) -> str:
    """``train.py:12`` of ``/home/user/train.py:12``."""
    return Path(site).name
