"""Watches the steps of a function, and finds what they could still donate."""

from __future__ import annotations

from collections.abc import Sequence

from torch_xla_donate import _C, _frames
from torch_xla_donate._report.walk import Named, name_tensors
from torch_xla_donate._text import cut
from torch_xla_donate._tools.findings import Call, Finding, Key, find
from torch_xla_donate._tools.hints import Advice, Hint

_NAMED_STEPS = 16  # of each call; naming tensors walks the program's objects
_SHOWN = 4  # holders after the first
_SMALLEST = 1024  # bytes on a device that a hint saves


class StepWatch:
    """Finds what the steps that `note` gets could still donate.

    Watching donates nothing, changes no graph and runs no operation. It finds the inputs of a step as `auto_donate`
    does, and looks for the names of tensors among the program's variables.

    Attributes:
        call: the call whose last step comes next; None for other steps.
    """

    def __init__(self) -> None:
        self.call: Call | None = None
        self._findings: dict[Key, Finding] = {}
        self._before: dict[int, Named] | None = None  # the live tensors after the last step; None if unknown
        self._computed: set[int | None] = set()  # alias ids of outputs
        self._left = _NAMED_STEPS

    def begin(self) -> None:
        """Only the steps of the call that begins now count. They are compared with the steps before."""
        self._findings.clear()
        self._left = _NAMED_STEPS

    def note(self, step: _C.WatchedStep) -> None:
        """Examines a step that ends now on this thread."""
        if not self._left:
            self._before = None
            self._computed.clear()
            return
        self._left -= 1
        now = name_tensors()
        before, self._before = self._before, now
        found: dict[Key, Finding] = {}
        if before is not None:  # else all inputs would seem to have no names
            found = find(step, _frames.call_site(), before, now, self._computed, self.call)
        self._computed.update(step.outputs)
        for key, finding in found.items():
            finding.runs = self._findings.get(key, Finding()).runs + 1
            self._findings[key] = finding

    def advice(self) -> Advice:
        """The hints of the call."""
        return Advice(_hint(key, finding) for key, finding in self._findings.items() if finding.bytes >= _SMALLEST)


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
