"""The findings of one run of a step: inputs that could be donated, and their holders."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container, Mapping

import torch

from torch_xla_donate import _C, _frames
from torch_xla_donate._report.explain import split_sharding
from torch_xla_donate._report.holders import UNKNOWN, graph_text, graphs_saving, references
from torch_xla_donate._report.reasons import sentence
from torch_xla_donate._report.walk import Name, Named
from torch_xla_donate._tools.hints import HintKind


@dataclasses.dataclass(frozen=True)
class Key:
    """The same finding in each run of a step."""

    kind: HintKind
    site: str
    where: str = ""
    variable: str = ""
    holder: str = ""


@dataclasses.dataclass
class Finding:
    """The findings of one kind in the last run of a step.

    names: of the first array.
    holders: the texts of what holds the arrays, the one that holds the most of them first.
    graphs: of these the tensors whose graphs of autograd hold them, by text.
    automatic: whether the step donates free inputs anyway.
    """

    names: list[Name] = dataclasses.field(default_factory=list)
    bytes: int = 0
    array: str = ""
    largest: int = 0
    count: int = 0
    automatic: bool = False
    detail: str = ""
    holders: tuple[str, ...] = ()
    graphs: dict[str, Name] = dataclasses.field(default_factory=dict)
    runs: int = 0

    def add(self, array: str) -> None:
        """Adds an array, as XLA writes it with its sharding."""
        size = _C.size_on_device(array) or 0
        self.bytes += size
        self.count += 1
        if size > self.largest:
            self.array, self.largest = split_sharding(array)[0], size


@dataclasses.dataclass(frozen=True)
class Call:
    """The running call of `advise`.

    where: ``file:line`` of the function.
    arguments: the number and the name of each argument that holds a tensor, by alias id.
    leaves: how many XLA tensors each of these arguments holds.
    results: the tensors of the function's result, by alias id.
    """

    where: str
    arguments: Mapping[int, tuple[int | str, str]]
    leaves: Mapping[int | str, int]
    results: Mapping[int, torch.Tensor]


def find(
    step: _C.WatchedStep,
    site: str,
    before: Mapping[int, Named],
    now: Mapping[int, Named],
    computed: Container[int | None],
    call: Call | None = None,
) -> dict[Key, Finding]:
    """The findings of one run of a step.

    Args:
        before: the tensors of the program after the step before.
        now: those after the step.
        computed: the alias ids of earlier steps' outputs.
        call: set at the end of a function's call.
    """
    findings: dict[Key, Finding] = {}

    def note(key: Key, array: str, names: tuple[Name, ...] = (), detail: str = "") -> None:
        if key not in findings:
            findings[key] = Finding([*names], automatic=step.automatic, detail=detail)
        findings[key].add(array)

    inputs = step.inputs
    if step.reason:
        for raw in inputs if step.reason.code in ("ignored", "auto_sharding") else ():
            if raw.use in ("updated_in_place", "marked"):
                note(Key("lost_alias", site), raw.array, detail=sentence(step.reason))
        return findings
    # The names of the step's outputs, by place of the program.
    places = {name.place: name for alias in step.outputs if alias in now for name in now[alias].names}
    results = call.results if call is not None else {}
    arguments = call.arguments if call is not None else {}
    # Only values that an earlier step has computed, and that no step has read before: not parameters and data.
    held = [raw for raw in inputs if raw.use == "held" and raw.tensor in computed and not raw.seen_before]
    buffers = dict.fromkeys(raw.buffer for raw in held if raw.tensor not in arguments)
    kept: list[_C.WatchedInput] = []
    donated: list[_C.WatchedInput] = []  # arguments
    for raw in inputs:
        if raw.use == "other" or raw.preferred_output is None:
            continue
        new = now.get(raw.preferred_output)
        output = results.get(raw.preferred_output, new.tensor() if new is not None else None)
        if output is not None and _C.size_on_device(_C.array_of(output)) != _C.size_on_device(raw.array):
            names = tuple(new.names) if new is not None else ()
            note(
                Key("output_sharding", site, "", names[0].variable if names else ""),
                raw.array,
                names,
                split_sharding(raw.array)[1],
            )
        elif raw.use == "free" and not step.automatic:
            old = before.get(raw.tensor) if raw.tensor is not None else None
            key, names = _free(raw, site, old, now, places)
            note(key, raw.array, names)
        elif raw.use == "held" and raw.tensor in arguments:
            if raw.preferred_output in results:
                donated.append(raw)
        elif raw.use == "held" and raw.buffer in buffers:
            kept.append(raw)
    for key, finding in _held(kept, site, before, now).items():
        findings[key] = dataclasses.replace(finding, automatic=step.automatic)
    if call is not None:
        whole = _whole_arguments(call, donated)
        given = dict.fromkeys(call.arguments[raw.tensor] for raw in whole)  # type: ignore[index]
        holder = ", ".join(f"argument {name!r}" for _, name in given)
        detail = _donate(sorted((number for number, _ in given), key=str))
        for raw in whole:
            note(Key("functional_update", site, call.where, "", holder), raw.array, (), detail)
    return findings


def _held(
    inputs: list[_C.WatchedInput], site: str, before: Mapping[int, Named], now: Mapping[int, Named]
) -> dict[Key, Finding]:
    """The findings for inputs that are held. Those that a variable leads to, such as a list, are one finding."""
    if not inputs:
        return {}
    names_of = references({raw.buffer for raw in inputs}, now)
    graphs: dict[int, dict[str, Name]] = {buffer: {} for buffer in names_of}
    for name, saved in graphs_saving({*names_of}, now.values()):
        for buffer in saved:
            graphs[buffer][graph_text(name)] = name
    held_by = Counter(root for names in names_of.values() for root in {name.root for name in names})
    groups: dict[Key, tuple[Finding, list[Name], list[str]]] = {}
    for raw in inputs:
        names, graph_of = names_of[raw.buffer], graphs[raw.buffer]
        texts = sorted(graph_of) or ([] if names else [UNKNOWN])
        if names:
            names.sort(key=lambda name: -held_by[name.root])
            own = names[:1]
            key = Key("held_input", site, own[0].place_of_assignment(), own[0].variable)
        else:
            old = before.get(raw.tensor)  # type: ignore[arg-type]
            own = old.names if old is not None else []
            kind: HintKind = "kept_graph" if graph_of else "held_input"
            key = Key(kind, site, "", "", ", ".join(texts))
        finding, named, unnamed = groups.setdefault(key, (Finding([*own]), [], []))
        finding.add(raw.array)
        finding.graphs.update(graph_of)
        named += names
        unnamed += texts
    for finding, named, unnamed in groups.values():
        is_one = finding.count == 1
        by_root: dict[object, Name] = {}
        for name in named:
            by_root.setdefault(name.slot if is_one else name.root, name)
        finding.holders = (*dict.fromkeys([*(name.holder(with_path=is_one) for name in by_root.values()), *unnamed]),)
    return {key: finding for key, (finding, _, _) in groups.items()}


def _whole_arguments(call: Call, donated: list[_C.WatchedInput]) -> list[_C.WatchedInput]:
    """The inputs of arguments of which every tensor has a result to go to. `compile` donates whole arguments."""
    count = Counter(call.arguments[raw.tensor][0] for raw in donated if raw.tensor is not None)
    return [
        raw
        for raw in donated
        if raw.tensor is not None and count[(key := call.arguments[raw.tensor][0])] == call.leaves[key]
    ]


def _donate(numbers: list[int | str]) -> str:
    """The options of `compile` for some arguments."""
    positions = tuple(number for number in numbers if isinstance(number, int))
    names = tuple(number for number in numbers if isinstance(number, str))
    options = [f"donate_argnums={positions}"] if positions else []
    return ", ".join(options + ([f"donate_argnames={names}"] if names else []))


def _free(
    raw: _C.WatchedInput,
    site: str,
    old: Named | None,
    now: Mapping[int, Named],
    places: Mapping[tuple[object, ...], Name],
) -> tuple[Key, tuple[Name, ...]]:
    """The finding for an input that the program cannot read after the step."""
    # A tensor that was written by slices still has its old value.
    new = now.get(raw.tensor) or now.get(raw.preferred_output)  # type: ignore[arg-type]
    tensor = new.tensor() if new is not None else None
    if new is not None and tensor is not None and (raw.tensor in now or (old and old.tensor() is tensor)):
        name = new.names[0]
        stack, is_slice = _C.last_write(tensor) or ([], False)
        where = _frames.site_of(stack) or name.place_of_assignment()
        is_slice = is_slice or len(set(_C.alias_ids(tensor))) > 1  # a thread without Python may have written it
        kind: HintKind = "slice_assignment" if is_slice else "lost_alias"
        return Key(kind, site, where, name.variable), tuple(new.names)
    names = tuple(name for name in old.names if name.place in places) if old is not None else ()
    if not names:
        return Key("free_input", site), tuple(old.names) if old is not None else ()
    name = places[names[0].place]
    kind = "functional_update" if name.path else "reassignment"
    return Key(kind, site, name.place_of_assignment(), name.variable), names
