"""The closed set of reasons why a donor was not donated, and the sentences for the hooks' codes."""

from __future__ import annotations

import enum

from torch_xla_donate import _C
from torch_xla_donate._host.settings import AUTO_SHARDING


class Reason(str, enum.Enum):
    """Why a donor was not donated, or why `auto_donate` skipped a step: `Donor.reason_code`.

    Each member is a string, so it compares equal to its value and is plain data for ``json.dumps``. `Donor.reason` has
    the sentence. docs/errors.md lists all members.
    """

    __str__ = str.__str__

    # A mark that no step has read.
    UNREAD = "unread"
    # From the sizes of donors and outputs.
    NO_OUTPUT_OF_ITS_SIZE = "no_output_of_its_size"
    MORE_DONORS_THAN_OUTPUTS = "more_donors_than_outputs"
    OUTPUTS_TAKEN = "outputs_taken"
    SHARDED_DIFFERENTLY = "sharded_differently"
    DYNAMIC_SIZE = "dynamic_size"
    OUTPUTS_GONE = "outputs_gone"
    # Of one donor.
    ANOTHER_BUFFER = "another_buffer"
    HELD_BY_OTHERS = "held_by_others"
    HAS_VIEWS = "has_views"
    CONSTANT = "constant"
    READ_EAGERLY = "read_eagerly"
    NOT_READ = "not_read"
    CLOSED_OVER = "closed_over"
    STILL_NEEDED = "still_needed"
    GRAPH_BREAK = "graph_break"
    MODULE_HOOKS = "module_hooks"
    PARTIAL_GRAPH = "partial_graph"
    NO_GRAPH = "no_graph"
    UNKNOWN_OUTPUTS = "unknown_outputs"
    HOST_OPERATIONS = "host_operations"
    PERHAPS_RETURNED = "perhaps_returned"
    SAVED_FOR_BACKWARD = "saved_for_backward"
    EAGER_COMPUTATION = "eager_computation"
    # Of a step and all its donors.
    UNMATCHED = "unmatched"
    IGNORED = "ignored"
    AUTO_SHARDING = "auto_sharding"
    DISABLED = "disabled"
    DEBUG_NANS = "debug_nans"
    DEBUG_PROCESS = "debug_process"
    KEPT_NODES = "kept_nodes"
    SYMBOLIC_SIZES = "symbolic_sizes"
    SHARED_GRAPHS = "shared_graphs"
    DEVICE_LOCKED = "device_locked"
    TOKEN_KEPT = "token_kept"
    UNSUPPORTED = "unsupported"
    FUNCTIONALIZATION_OFF = "functionalization_off"
    # Of a step that failed or did not run.
    GIVEN_UP = "given_up"
    NOT_COMPILED = "not_compiled"
    EARLIER_STEP_FAILED = "earlier_step_failed"
    FAILED = "failed"
    FAILED_FOREIGN = "failed_foreign"


_TOKEN = "torch_xla's token for collectives may read inputs of the step, and the package could not drop it: "
_FAILED = "the step failed: "
_IGNORED = "{details} makes torch_xla ignore every donor"

# By code of csrc/registry/reasons.h. {details} is the text that a reason carries.
SENTENCES = {
    Reason.ANOTHER_BUFFER: (
        "its tensor got another buffer before a step read the marked one (xs.mark_sharding does this); donate it "
        "afterwards"
    ),
    Reason.HELD_BY_OTHERS: (
        "another live tensor, which was not donated, holds the same buffer (as after a whole copy, b.copy_(t)); "
        "donate both, or clone one of them"
    ),
    Reason.HAS_VIEWS: "it has views, which share its graph while functionalization is off",
    Reason.CONSTANT: "torch_xla shares this buffer between tensors (a cached constant)",
    Reason.READ_EAGERLY: "eager mode runs each operation at once, outside a step, and ran one that reads it",
    Reason.NOT_READ: "not read by the step",
    Reason.CLOSED_OVER: "the function also closes over it",
    Reason.STILL_NEEDED: "the result, or the backward pass, still needs it",
    Reason.GRAPH_BREAK: "torch.compile broke the function's graph, and the code after the break may read it",
    Reason.MODULE_HOOKS: "the module has hooks, which run outside the compiled graph and may read it",
    Reason.PARTIAL_GRAPH: "torch.compile did not compile the whole function, and the rest may read it",
    Reason.NO_GRAPH: "torch.compile compiled no graph of the function, and code outside a graph may read it",
    Reason.UNKNOWN_OUTPUTS: "torch.compile does not report which inputs of its graph outlive it",
    Reason.HOST_OPERATIONS: "operations that run on the host split the graph, and a later part may read it",
    Reason.PERHAPS_RETURNED: "the function may return it unchanged; looking for that raised {details}",
    Reason.SAVED_FOR_BACKWARD: "autograd has saved it for the backward scan",
    Reason.EAGER_COMPUTATION: (
        "eager mode runs each operation at once, so the computation runs outside a step; call it in a function of "
        "torch_xla.compile, or without eager mode"
    ),
    Reason.UNMATCHED: "the outputs of the step could not be matched with live tensors",
    Reason.IGNORED: _IGNORED,
    Reason.AUTO_SHARDING: _IGNORED.replace("{details}", AUTO_SHARDING),
    Reason.DISABLED: "donation is disabled (donation_disabled())",
    Reason.DEBUG_NANS: "donation is disabled (debug_nans())",
    Reason.DEBUG_PROCESS: "donation is disabled (TORCH_XLA_DONATE_DEBUG_NANS=1)",
    Reason.KEPT_NODES: "torch keeps nodes for later graphs (torch_lazy_reuse_ir), and these nodes hold their inputs",
    Reason.SYMBOLIC_SIZES: (
        "the program has made a size that only the device knows (XLA_EXPERIMENTAL), and its pending graph, which no "
        "live tensor shows, may read inputs of the step"
    ),
    Reason.SHARED_GRAPHS: "functionalization is off and a live tensor is a view, or has views, which share its graph",
    Reason.DEVICE_LOCKED: f"{_TOKEN}torch_xla has locked the device already",
    Reason.TOKEN_KEPT: f"{_TOKEN}{{details}}",
    Reason.UNSUPPORTED: "{details}",
    Reason.FUNCTIONALIZATION_OFF: (
        "functionalization is off (XLA_DISABLE_FUNCTIONALIZATION=1), so views share graphs with live tensors"
    ),
    Reason.GIVEN_UP: "the step was given up before it ran, or ran without donation (see `errors` of the report)",
    Reason.NOT_COMPILED: f"{_FAILED}it did not compile",
    Reason.EARLIER_STEP_FAILED: f"{_FAILED}an earlier step failed",
    Reason.FAILED: f"{_FAILED}{{details}}",
    Reason.FAILED_FOREIGN: f"{_FAILED}unknown error",
}


def sentence(reason: _C.Reason) -> str:
    """The sentence for a reason; empty for no reason. It has only the first line of an error."""
    if not reason:
        return ""
    code = Reason(reason.code)
    details = reason.details if code is Reason.UNSUPPORTED else reason.details.partition("\n")[0]
    return SENTENCES[code].replace("{details}", details)


def no_donation() -> _C.Reason:
    """The reason why steps of this thread donate nothing; no reason if they donate."""
    return _C.disabled_reason() or _C.switched_off()
