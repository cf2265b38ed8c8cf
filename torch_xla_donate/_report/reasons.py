"""The sentences for the hooks' reason codes, which say why a donor was not donated or a step has no donors."""

from __future__ import annotations

from torch_xla_donate import _C
from torch_xla_donate._host.settings import AUTO_SHARDING

HELD_BY_OTHERS = (
    "another live tensor, which was not donated, holds the same buffer (as after a whole copy, b.copy_(t)); "
    "donate both, or clone one of them"
)
CONSTANT = "torch_xla shares this buffer between tensors (a cached constant)"

_TOKEN = "torch_xla's token for collectives may read inputs of the step, and the package could not drop it: "
_FAILED = "the step failed: "
_IGNORED = "{details} makes torch_xla ignore every donor"

# By code of csrc/registry/reasons.h. {details} is the text that a reason carries.
SENTENCES = {
    "none": "",
    "given": "{details}",
    "another_buffer": (
        "its tensor got another buffer before a step read the marked one (xs.mark_sharding does this); donate it "
        "afterwards"
    ),
    "held_by_others": HELD_BY_OTHERS,
    "has_views": "it has views, which share its graph while functionalization is off",
    "constant": CONSTANT,
    "read_eagerly": "eager mode runs each operation at once, outside a step, and ran one that reads it",
    "unmatched": "the outputs of the step could not be matched with live tensors",
    "ignored": _IGNORED,
    "auto_sharding": _IGNORED.replace("{details}", AUTO_SHARDING),
    "disabled": "donation is disabled (donation_disabled())",
    "debug_nans": "donation is disabled (debug_nans())",
    "debug_process": "donation is disabled (TORCH_XLA_DONATE_DEBUG_NANS=1)",
    "kept_nodes": "torch keeps nodes for later graphs (torch_lazy_reuse_ir), and these nodes hold their inputs",
    "shared_graphs": "functionalization is off and a live tensor is a view, or has views, which share its graph",
    "device_locked": f"{_TOKEN}torch_xla has locked the device already",
    "token_kept": f"{_TOKEN}{{details}}",
    "plan_failed": "the package could not choose the donors of the step: {details}",
    "given_up": f"{_FAILED}the step was given up before it ran",
    "not_compiled": f"{_FAILED}it did not compile",
    "earlier_step_failed": f"{_FAILED}an earlier step failed",
    "failed": f"{_FAILED}{{details}}",
    "failed_foreign": f"{_FAILED}unknown error",
}


def sentence(reason: _C.Reason) -> str:
    """The sentence for a reason; empty for no reason. It has only the first line of an error."""
    details = reason.details if reason.code == "given" else reason.details.partition("\n")[0]
    return SENTENCES[reason.code].replace("{details}", details)


def no_donation() -> str:
    """The reason why steps of this thread donate nothing; empty if they donate."""
    return sentence(_C.disabled_reason()) or sentence(_C.switched_off())
