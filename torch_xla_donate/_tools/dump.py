"""Summarises the modules of a dump, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch_xla_donate import hlo
from torch_xla_donate._tools.summary import SkippedFile, StepDonor, StepSummary
from torch_xla_donate.hlo.dump import ENTRY, copied_bytes


class ModuleText(NamedTuple):
    """One HLO text of a dump, and its module."""

    module: hlo.HloModule
    text: str


class DumpedStep(NamedTuple):
    """A module of a dump.

    Attributes:
        summary: its summary.
        before: the file of its text before optimisation; None without one.
        signature: of its optimised text, or of the only text; see `signature_of`.
        digest: equal for equal texts.
    """

    summary: StepSummary
    before: Path | None
    signature: int
    digest: bytes


def read_steps(files: Sequence[tuple[str, Path]], skipped: list[SkippedFile]) -> list[DumpedStep]:
    """The steps of the (stage, path) of one number: one, or several if several processes dumped to the folder.

    Adds the files that it cannot read to `skipped`.
    """
    found: dict[str, dict[str, ModuleText]] = {}
    for stage, path in files:
        try:
            read = read_text(path)
        except (OSError, ValueError) as error:
            skipped.append(SkippedFile(str(path), str(error).removeprefix(f"{path}: ")))
            continue
        found.setdefault(read.module.name, {})[stage] = read
    steps = []
    for stages in found.values():
        before, after = stages.get("before_optimizations"), stages.get("after_optimizations")
        compiled = after or before
        assert compiled is not None, "a step has a text"
        digest = hashlib.blake2b(compiled.text.encode(), digest_size=16).digest()
        original = None if before is None else before.module.path
        steps.append(DumpedStep(summarize(before, after), original, signature_of(compiled.module), digest))
    return steps


def read_text(path: Path) -> ModuleText:
    """Reads an HLO text.

    Raises:
        ValueError: the file is not HLO text, or it ends before its entry computation does.
        OSError: it cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("HloModule"):
        raise ValueError(f"it is not HLO text; it begins with {text[:24]!r}")
    if "\n" not in text:
        raise ValueError("it is truncated: it ends in its first line")
    entry = ENTRY.search(text)
    if entry is None or text.find("\n}", entry.end()) < 0:
        raise ValueError("it is truncated: its entry computation has no end")
    return ModuleText(hlo.parse(path), text)


def signature_of(module: hlo.HloModule) -> int:
    """Equal for equal names, parameters, results, aliases and donors.

    The header of a running executable does not have all attributes of the dump, such as the number of replicas.
    """
    return hash((module.name, module.parameters, module.result, module.aliases, module.donors))


def summarize(before: ModuleText | None, after: ModuleText | None) -> StepSummary:
    """A step from its texts. Donors are those of either text, because JAX writes aliases, and torch_xla donors."""
    texts = [text.module for text in (before, after) if text is not None]
    compiled = texts[-1]
    offered = {donor for text in texts for donor in (*text.donors, *(alias.donor for alias in text.aliases))}
    number_of = {hlo.BufferDonor(*place): number for number, place in enumerate(compiled.leaves)}
    whole = compiled
    outcomes: dict[hlo.BufferDonor, hlo.DonorOutcome] = {}
    copied: dict[int, int] = {}
    if after is not None:
        # A compiler that changed the parameters leaves no shapes of the whole arrays.
        is_alike = before is not None and (
            list(before.module.leaves) == list(after.module.leaves)
            and len(list(before.module.result.leaves())) == len(list(after.module.result.leaves()))
        )
        whole = before.module if before is not None and is_alike else after.module
        outcomes = {outcome.donor: outcome for outcome in hlo.donor_outcomes(whole, after.module)}
        copied = copied_bytes(after.text)
    output_of = {index: number for number, (index, _) in enumerate(whole.result.leaves())}
    donors = []
    for donor in sorted(offered & number_of.keys(), key=number_of.__getitem__):
        reason = "the dump has no text after optimisation" if after is None else "the compiler dropped the donation"
        outcome = outcomes.get(donor) or hlo.DonorOutcome(donor, compiled.shape_of(donor), None, reason)
        donors.append(
            StepDonor(
                parameter=number_of[donor],
                array=str(outcome.shape),
                bytes=outcome.shape.padded_bytes,
                kind="unknown",
                output=None if outcome.output is None else output_of[outcome.output],
                reason=outcome.reason,
                copied_bytes=0 if outcome.output is None else copied.get(number_of[donor], 0),
            )
        )
    return StepSummary(
        module=compiled.name,
        file="" if after is None else str(after.module.path),
        parameters=len(number_of),
        outputs=len(output_of),
        donors=tuple(donors),
        aliases=0 if after is None else len(after.module.aliases),
    )
