"""Watches the steps of a program, and finds what they could still donate."""

from __future__ import annotations

import re
import threading
import types
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch_xla_donate import _C, _frames
from torch_xla_donate._locks import make_lock
from torch_xla_donate._modes.debug import listen, note_error, stop_listening
from torch_xla_donate._report.holders import searching
from torch_xla_donate._tools import edits
from torch_xla_donate._tools.findings import Call, Finding, Key, find, gradients
from torch_xla_donate._tools.hints import Advice, Change, Hint
from torch_xla_donate._tools.names import Named, name_tensors
from torch_xla_donate._tools.source import read

_NAMED_RUNS = 4  # of each kind of step; naming tensors walks the program's objects
_SHOWN = 4  # holders after the first
_KINDS = 256  # of steps; a program may end each of its steps at another line, or with other inputs


class _ThreadState(threading.local):
    """The state of a thread after its last step.

    before: the names of the live tensors; None if they were not looked for.
    computed: alias ids of outputs.
    gradients: gradients that the step wrote, by buffer, until the next step shows whether it reads them.
    """

    def __init__(self) -> None:
        self.before: dict[int, Named] | None = None
        self.gradients: dict[int, tuple[Key, Finding]] = {}
        self.computed: set[int | None] = set()
        self.quiet = 0


class Recorder:
    """Watches all steps of this process while its context is open. `advice` has what it found.

    Watching donates nothing, changes no graph and runs no operation. It finds the inputs of a step as `auto_donate`
    does. In the first runs of each step it also looks for the names of tensors among the program's variables.

    Args:
        min_bytes: hints that save fewer bytes on a device are left out.
        min_runs: how many runs of a step must show a finding. The first run of a loop differs from the others.
    """

    def __init__(self, *, min_bytes: int = 1024, min_runs: int = 2) -> None:
        self._min_bytes, self._min_runs = min_bytes, min_runs
        self._findings: dict[Key, Finding] = {}
        self._runs: Counter[tuple[Any, ...]] = Counter()
        self._codes: dict[str, types.CodeType] = {}  # that end steps, by site
        self._main: tuple[str, int] | None = None  # the first line of the main module that runs steps
        self._thread = _ThreadState()
        self._lock = make_lock()
        self.call: Call | None = None

    def __enter__(self) -> Recorder:
        try:
            self._thread.before = _names()
            listen(self.note)
        except BaseException:  # an interrupt
            stop_listening(self.note)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_listening(self.note)

    def saw_steps(self) -> bool:
        """Whether a step has ended while its context was open."""
        return bool(self._runs)

    def forget(self) -> None:
        """Drops the findings, but not the names. Later steps are still compared with the steps before."""
        with self._lock:
            self._findings.clear()

    def advice(self) -> Advice:
        """The hints so far."""
        with self._lock:
            found = [(key, finding, self._codes.get(key.site)) for key, finding in self._findings.items()]
            main = self._main
        automatic = edits.call_auto_donate(*main) if main is not None else []
        return Advice(
            _hint(key, finding, automatic, code)
            for key, finding, code in found
            if finding.runs >= self._min_runs and finding.bytes >= self._min_bytes
        )

    def note(self, step: _C.WatchedStep) -> None:
        """Examines a step that ends now on this thread."""
        site = _frames.call_site()
        main = _frames.main_place()
        here = self._thread
        run = site, hash(tuple(raw.use for raw in step.inputs))
        with self._lock:
            if main is not None and (self._main is None or main[1] < self._main[1]):
                self._main = main
            if run in self._runs or len(self._runs) < _KINDS:
                self._runs[run] += 1
            here.quiet = 0 if 0 < self._runs[run] <= _NAMED_RUNS else here.quiet + 1
        if here.quiet > _NAMED_RUNS:
            here.before, here.gradients = None, {}
            here.computed.clear()
            return
        with searching:
            now = name_tensors()
            findings = find(step, site, here.before, now, here.computed, self.call)
        here.computed.update(step.outputs)
        read = {raw.buffer for raw in step.inputs}
        for buffer, (key, one) in here.gradients.items():
            if buffer not in read:
                findings.setdefault(key, Finding()).merge(one)
        here.before, here.gradients = now, gradients(step, site, now)
        frame = _frames.user_frame()
        with self._lock:
            if frame is not None:
                self._codes[site] = frame.f_code
            for key, finding in findings.items():
                finding.runs = self._findings.get(key, Finding()).runs + 1
                self._findings[key] = finding


def _names() -> dict[int, Named] | None:
    try:
        return name_tensors()
    except Exception as error:
        note_error(error)
        return None


def _hint(key: Key, finding: Finding, automatic: list[Change], code: types.CodeType | None) -> Hint:
    """The hint for a finding, with the edit. `code` ended the step; `automatic` calls `auto_donate`."""
    # Without the source that the program ran, only `auto_donate` is safe.
    source = read(key.site.rpartition(":")[0])
    site = key.site if source is not None and code is not None and source.compiles_to(code) else ""
    name = finding.names[0] if finding.names else None
    where = key.where or key.site
    root = (name.variable if finding.count > 1 else str(name)) if name is not None else ""
    edit, changes = edits.AUTO_DONATE, automatic
    if key.kind == "reassignment" and name is not None:
        marks = edits.donate_before(name, where, site)
        if marks:
            edit, changes = f"torch_xla_donate.donate_buffer({name}) before this line", marks
    elif key.kind == "functional_update":
        if finding.detail:
            edit, changes = f"torch_xla_donate.compile(..., {finding.detail}), if the caller uses only the result", []
        else:
            edit += ", or donate_argnums of torch_xla_donate.compile for a step that is a function"
    elif key.kind == "kept_graph":
        edit, changes = _detach(finding, automatic, site)
        where = _where(finding.holders[0], key.site) or where
    elif key.kind == "kept_gradient":
        optimizer = edits.optimizer_of([each.variable for each in finding.names], site) or "optimizer"
        # Other code may read the gradients in ways that no source shows, so there is no diff.
        edit, changes = f"{optimizer}.zero_grad(set_to_none=True) after the last use of the gradients", []
    elif key.kind == "held_input":
        edit, changes = "", []
    elif key.kind == "output_sharding":
        edit, changes = (
            f"xs.mark_sharding({root or 'output'}, ...) with the sharding of the input, {finding.detail}",
            [],
        )
    elif not name and finding.detail:
        edit, changes = f"change the setting: {finding.detail}", []
    return Hint(
        kind=key.kind,
        bytes=finding.bytes,
        array=finding.array,
        count=finding.count,
        name=root,
        where=where,
        holder=_listed(finding.holders) or key.holder,
        edit=edit,
        site=key.site,
        runs=finding.runs,
        changes=tuple(changes),
    )


def _detach(finding: Finding, automatic: list[Change], site: str) -> tuple[str, list[Change]]:
    """The edit for graphs that variables keep alive. The inputs are then free, which `auto_donate` donates."""
    also = "" if finding.automatic else f" and {edits.AUTO_DONATE}"
    found = [re.fullmatch(r"grad_fn of variable '(\w+)' at .*", holder) for holder in finding.holders]
    variables = [variable[1] for variable in found if variable is not None]
    if len(variables) < len(found):
        return f"keep the .detach() of {'it' if len(found) == 1 else 'each'}{also}", []
    each = [edits.detach_before(variable, site) for variable in variables]
    changes = [change for one in each for change in one] if all(each) else []
    if changes and not finding.automatic:
        changes = [*automatic, *changes] if automatic else []
    statements = ", ".join(f"{variable} = {variable}.detach()" for variable in variables)
    return f"{statements} before the step ends{also}", changes


def _listed(texts: Sequence[str]) -> str:
    first, more = texts[:1], texts[1:]
    shown = ", ".join([*more[:_SHOWN], *(["..."] if len(more) > _SHOWN else [])])
    return "".join(first) + (f" and {len(more)} more: {shown}" if more else "")


def _where(holder: str, site: str) -> str:
    """``file:line`` of the variable that holds something. The holder has only the file's name."""
    place = re.search(r" at (.*):(\d+)$", holder)
    file = site.rpartition(":")[0]
    return f"{file}:{place[2]}" if place is not None and file.rpartition("/")[2] == place[1] else ""
