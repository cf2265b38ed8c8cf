"""Sentences on what the donation of a step saves."""

from __future__ import annotations

from torch_xla_donate._text import cut, size
from torch_xla_donate._tools.summary import StepSummary

_SHOWN = 3
# Temporaries that grow by less than this share of the aliased bytes are not worth a sentence.
_NOTABLE = 0.1
_FULL = 0.9


def findings(step: StepSummary) -> list[str]:
    """Sentences on memory that the aliases of a step do not save. Empty if they save all of it, or if it is unknown."""
    found = []
    copied = [donor for donor in step.donors if donor.copied_bytes]
    if copied:
        names = [donor.name or f"parameter {donor.parameter}" for donor in copied]
        shown = ", ".join(cut(names, _SHOWN, "and {:,} more"))
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
