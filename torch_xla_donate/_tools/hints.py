"""The hints of `advise`: what a program could still donate, with the line and the call to write."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, get_args

from rich.table import Table
from typing_extensions import Self

from torch_xla_donate import _config
from torch_xla_donate._errors import SWITCHED_OFF
from torch_xla_donate._report.console import render
from torch_xla_donate._text import plural, size

HintKind = Literal[
    "slice_assignment",
    "reassignment",
    "functional_update",
    "free_input",
    "kept_graph",
    "held_input",
    "lost_alias",
    "output_sharding",
]

SENTENCES: dict[HintKind, str] = {
    "slice_assignment": "a write to a part of it copies all of it at every step",
    "reassignment": "the new value gets other memory, although nothing reads the old one",
    "functional_update": "the new values get other memory, although nothing reads the old ones",
    "free_input": "nothing holds it after the step, and an output has its size",
    "kept_graph": "a graph of autograd keeps the old value until after the step",
    "held_input": "its holder keeps the old value until after the step",
    "lost_alias": "updated in place, but not in its memory",
    "output_sharding": "the next value takes other bytes on each device",
}
assert set(SENTENCES) == set(get_args(HintKind))
NOTHING = (
    "No hint saves 1 KiB or more. Arguments of a compiled function and graphs of torch.compile are not examined: pass "
    "the function itself."
)


@dataclasses.dataclass(frozen=True)
class Hint:
    """Memory that a step could save.

    Attributes:
        kind: see `docs/commands.md`.
        bytes: bytes on one device that a run of the step saves with the call.
        array: the largest array, in XLA's notation, such as ``f32[8,4]``.
        count: the number of arrays.
        name: as the program reaches it, such as ``model.fc.weight``; empty if unknown.
        where: ``file:line`` of the code to change; empty if unknown.
        holder: what is found to hold it after the step, the first five; empty if nothing does.
        edit: the call to write; empty if only the program can tell what to change.
        site: ``file:line`` of the end of the step.
        runs: how many watched runs of the step showed it.
    """

    kind: HintKind
    bytes: int
    array: str
    count: int
    name: str
    where: str
    holder: str
    edit: str
    site: str
    runs: int

    @property
    def sentence(self) -> str:
        """The finding about the arrays."""
        return SENTENCES[self.kind]


class Advice(tuple[Hint, ...]):
    """Hints, those that save the most bytes on a device first. Empty if there is nothing to gain."""

    def __new__(cls, hints: Iterable[Hint] = ()) -> Self:
        return super().__new__(cls, sorted(hints, key=lambda hint: (-hint.bytes, hint.where, hint.name)))

    def __str__(self) -> str:
        nothing = SWITCHED_OFF if _config.IS_OFF else NOTHING
        return render(self.table()) if self else nothing

    def table(self) -> Table:
        """A row for each hint."""
        table = Table(
            title=f"{plural(len(self), 'hint')}. Bytes that a step saves on one device with the call",
            title_justify="left",
        )
        table.add_column("bytes", justify="right", no_wrap=True)
        for column in ("array", "where", "finding", "call to write"):
            table.add_column(column, overflow="fold")
        for hint in self:
            more = f" and {hint.count - 1} more" if hint.count > 1 else ""
            name = f"{hint.name}: " if hint.name else ""
            holder = f"; held by {hint.holder}" if hint.holder else ""
            table.add_row(
                size(hint.bytes),
                f"{hint.array}{more}",
                hint.where.rpartition("/")[2],
                f"{name}{hint.sentence}{holder}",
                hint.edit,
            )
        return table

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``json.dumps``."""
        return {"hints": [{**dataclasses.asdict(hint), "sentence": hint.sentence} for hint in self]}
