"""Watches the steps of a program, and finds what they could still donate."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch_xla_donate import _C, _frames
from torch_xla_donate._locks import make_lock
from torch_xla_donate._modes.debug import listen, note_error, stop_listening
from torch_xla_donate._report.holders import searching
from torch_xla_donate._report.walk import Named, name_tensors
from torch_xla_donate._text import cut
from torch_xla_donate._tools.findings import Call, Finding, Key, find
from torch_xla_donate._tools.hints import Advice, Hint

_NAMED_RUNS = 4  # of each kind of step; naming tensors walks the program's objects
_SHOWN = 4  # holders after the first
_KINDS = 256  # of steps; a program may end each of its steps at another line, or with other inputs


class _ThreadState(threading.local):
    """The state of a thread after its last step.

    before: the names of the live tensors; None if they were not looked for.
    computed: alias ids of outputs.
    """

    def __init__(self) -> None:
        self.before: dict[int, Named] | None = None
        self.computed: set[int | None] = set()
        self.quiet = 0


class StepWatch:
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
        self._thread = _ThreadState()
        self._lock = make_lock()
        self.call: Call | None = None

    def __enter__(self) -> StepWatch:
        try:
            self._thread.before = _names()
            listen(self.note)
        except BaseException:  # an interrupt
            stop_listening(self.note)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        stop_listening(self.note)

    def forget(self) -> None:
        """Drops the findings, but not the names. Later steps are still compared with the steps before."""
        with self._lock:
            self._findings.clear()

    def advice(self) -> Advice:
        """The hints so far."""
        with self._lock:
            found = list(self._findings.items())
        return Advice(
            _hint(key, finding)
            for key, finding in found
            if finding.runs >= self._min_runs and finding.bytes >= self._min_bytes
        )

    def note(self, step: _C.WatchedStep) -> None:
        """Examines a step that ends now on this thread."""
        site = _frames.call_site()
        here = self._thread
        run = site, hash(tuple(raw.use for raw in step.inputs))
        with self._lock:
            if run in self._runs or len(self._runs) < _KINDS:
                self._runs[run] += 1
            here.quiet = 0 if 0 < self._runs[run] <= _NAMED_RUNS else here.quiet + 1
        if here.quiet > _NAMED_RUNS:
            here.before = None
            here.computed.clear()
            return
        with searching:
            now = name_tensors()
            findings = find(step, site, here.before, now, here.computed, self.call)
        here.computed.update(step.outputs)
        here.before = now
        with self._lock:
            for key, finding in findings.items():
                finding.runs = self._findings.get(key, Finding()).runs + 1
                self._findings[key] = finding


def _names() -> dict[int, Named] | None:
    try:
        return name_tensors()
    except Exception as error:
        note_error(error)
        return None


_AUTO_DONATE = "call torch_xla_donate.set_auto_donate(True) before the loop"


def _hint(key: Key, finding: Finding) -> Hint:
    """The hint for a finding, with the call to write."""
    name = finding.names[0] if finding.names else None
    where = key.where or key.site
    root = (name.variable if finding.count > 1 else str(name)) if name is not None else ""
    edit = _AUTO_DONATE
    if key.kind == "functional_update":
        if finding.detail:
            edit = f"torch_xla_donate.compile(..., {finding.detail}), if the caller uses only the result"
        else:
            edit += ", or donate_argnums of torch_xla_donate.compile for a step that is a function"
    elif key.kind == "kept_graph":
        edit = _detach(finding)
        kept = finding.graphs[finding.holders[0]]
        where = f"{kept.file}:{kept.assigned()}" if kept.code is not None else where
    elif key.kind == "held_input":
        edit = ""
    elif key.kind == "output_sharding":
        edit = f"xs.mark_sharding({root or 'output'}, ...) with the sharding of the input, {finding.detail}"
    elif not name and finding.detail:
        edit = f"change the setting: {finding.detail}"
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
    )


def _detach(finding: Finding) -> str:
    """The call for graphs that variables keep alive. The inputs are then free, which `auto_donate` donates."""
    also = "" if finding.automatic else f" and {_AUTO_DONATE}"
    names = [finding.graphs[text] for text in finding.holders]
    if any(name.path or name.code is None for name in names):
        return f"keep the .detach() of {'it' if len(names) == 1 else 'each'}{also}"
    statements = ", ".join(f"{name.variable} = {name.variable}.detach()" for name in names)
    return f"{statements} before the step ends{also}"


def _listed(texts: Sequence[str]) -> str:
    first, more = texts[:1], texts[1:]
    return "".join(first) + (f" and {len(more)} more: {', '.join(cut(more, _SHOWN, '...'))}" if more else "")
