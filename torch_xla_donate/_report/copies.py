"""Warns of donated buffers that XLA copies before it overwrites them: ``TORCH_XLA_DONATE_WARN_COPIES=1``."""

from __future__ import annotations

from collections.abc import Sequence

from torch_xla_donate import _C, _config
from torch_xla_donate._errors import DonationWarning, see, warn
from torch_xla_donate._report.donors import describe_donors, facts_of
from torch_xla_donate._text import cut, size

_SHOWN = 5
_examined: set[str] = set()


def start() -> None:
    """Switches the warning on if the environment does. Raises ValueError for neither yes nor no."""
    if _config.flag("TORCH_XLA_DONATE_WARN_COPIES"):
        _C.look_for_copies()


def warn_of_copies() -> None:
    """Warns once for each graph that copies donated buffers, at the line of the first donation."""
    if not _C.has_new_graphs():
        return
    _C.wait_for_steps()  # a started step knows its graph
    _C.forget_new_graphs()
    raised: DonationWarning | None = None
    for step in _C.steps():
        facts = facts_of(step) if step["graph"] not in _examined else None
        if facts is None:
            continue
        _examined.add(step["graph"])
        copied = [raw for raw in step["donors"] if raw["parameter"] in facts.copied]
        if copied:
            try:
                warn(_text(copied, step), next((raw["where"] for raw in copied if raw["where"]), "auto_donate:0"))
            except DonationWarning as error:  # a filter turns warnings into errors; first examine the other graphs
                raised = raised or error
    if raised is not None:
        raise raised


def _text(copied: Sequence[_C._Donor], step: _C._Step) -> str:
    donors = describe_donors(copied, step)
    texts = []
    for donor in donors:
        name = "(auto)" if donor.automatic else donor.name
        texts.append(f"{donor.array}{f' {name}' if name else ''}: {size(donor.bytes)}")
    lines = [
        f"XLA reuses the memory of these donated buffers but copies them first, at each run of step {step['number']}:",
        *(f"  {text}." for text in cut(texts, _SHOWN)),
    ]
    lines.append(f"  An operation reads the old value after XLA begins to write the new one. {see('report')}")
    return "\n".join(lines)
