"""The closed set of reasons why a donor was not donated, and the sentences for the hooks' codes."""

from __future__ import annotations

import enum

from torch_xla_donate import _C
from torch_xla_donate._host.settings import AUTO_SHARDING

_TOKEN = "torch_xla's token for collectives may read inputs of the step, and the package could not drop it: "
_FAILED = "the step failed: "
_IGNORED = "{details} makes torch_xla ignore every donor"


class Reason(str, enum.Enum):
    """Why a donor was not donated, or why `auto_donate` skipped a step: `Donor.reason_code`.

    Each member is a string, so it compares equal to its value and is plain data for ``json.dumps``. `Donor.reason` has
    the sentence. docs/errors.md lists all members.
    """

    __str__ = str.__str__
    sentence: str  # of a hook's code; {details} is the text that a reason carries

    def __new__(cls, code: str, sentence: str = "") -> Reason:
        made = str.__new__(cls, code)
        made._value_, made.sentence = code, sentence
        return made

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
    ANOTHER_BUFFER = (
        "another_buffer",
        "its tensor got another buffer before a step read the marked one (xs.mark_sharding does this); donate it "
        "afterwards",
    )
    HELD_BY_OTHERS = (
        "held_by_others",
        "another live tensor, which was not donated, holds the same buffer (as after a whole copy, b.copy_(t)); "
        "donate both, or clone one of them",
    )
    HAS_VIEWS = ("has_views", "it has views, which share its graph while functionalization is off")
    CONSTANT = ("constant", "torch_xla shares this buffer between tensors (a cached constant)")
    READ_EAGERLY = ("read_eagerly", "eager mode runs each operation at once, outside a step, and ran one that reads it")
    NOT_READ = ("not_read", "not read by the step")
    CLOSED_OVER = ("closed_over", "the function also closes over it")
    STILL_NEEDED = ("still_needed", "the result, or the backward pass, still needs it")
    GRAPH_BREAK = ("graph_break", "torch.compile broke the function's graph, and the code after the break may read it")
    MODULE_HOOKS = ("module_hooks", "the module has hooks, which run outside the compiled graph and may read it")
    PARTIAL_GRAPH = ("partial_graph", "torch.compile did not compile the whole function, and the rest may read it")
    NO_GRAPH = ("no_graph", "torch.compile compiled no graph of the function, and code outside a graph may read it")
    UNKNOWN_OUTPUTS = ("unknown_outputs", "torch.compile does not report which inputs of its graph outlive it")
    HOST_OPERATIONS = (
        "host_operations",
        "operations that run on the host split the graph, and a later part may read it",
    )
    PERHAPS_RETURNED = ("perhaps_returned", "the function may return it unchanged; looking for that raised {details}")
    SAVED_FOR_BACKWARD = ("saved_for_backward", "autograd has saved it for the backward scan")
    EAGER_COMPUTATION = (
        "eager_computation",
        "eager mode runs each operation at once, so the computation runs outside a step; call it in a function of "
        "torch_xla.compile, or without eager mode",
    )
    # Of a step and all its donors.
    UNMATCHED = ("unmatched", "the outputs of the step could not be matched with live tensors")
    IGNORED = ("ignored", _IGNORED)
    AUTO_SHARDING = ("auto_sharding", _IGNORED.replace("{details}", AUTO_SHARDING))
    DISABLED = ("disabled", "donation is disabled (donation_disabled())")
    DEBUG_NANS = ("debug_nans", "donation is disabled (debug_nans())")
    DEBUG_PROCESS = ("debug_process", "donation is disabled (TORCH_XLA_DONATE_DEBUG_NANS=1)")
    KEPT_NODES = (
        "kept_nodes",
        "torch keeps nodes for later graphs (torch_lazy_reuse_ir), and these nodes hold their inputs",
    )
    SYMBOLIC_SIZES = (
        "symbolic_sizes",
        "XLA_EXPERIMENTAL lets torch_xla make sizes that only the device knows, and their pending graphs, which no "
        "live tensor shows, may read inputs of the step",
    )
    SHARED_GRAPHS = (
        "shared_graphs",
        "functionalization is off and a live tensor is a view, or has views, which share its graph",
    )
    DEVICE_LOCKED = ("device_locked", f"{_TOKEN}torch_xla has locked the device already")
    TOKEN_KEPT = ("token_kept", f"{_TOKEN}{{details}}")
    UNSUPPORTED = ("unsupported", "{details}")
    FUNCTIONALIZATION_OFF = (
        "functionalization_off",
        "functionalization is off (XLA_DISABLE_FUNCTIONALIZATION=1), so views share graphs with live tensors",
    )
    # Of a step that failed or did not run.
    GIVEN_UP = ("given_up", "the step was given up before it ran, or ran without donation (see `errors` of the report)")
    NOT_COMPILED = ("not_compiled", f"{_FAILED}it did not compile")
    EARLIER_STEP_FAILED = ("earlier_step_failed", f"{_FAILED}an earlier step failed")
    FAILED = ("failed", f"{_FAILED}{{details}}")
    FAILED_FOREIGN = ("failed_foreign", f"{_FAILED}unknown error")


def sentence(reason: _C.Reason) -> str:
    """The sentence for a reason; empty for no reason. It has only the first line of an error."""
    if not reason:
        return ""
    code = Reason(reason.code)
    details = reason.details if code is Reason.UNSUPPORTED else reason.details.partition("\n")[0]
    return code.sentence.replace("{details}", details)


def no_donation() -> _C.Reason:
    """The reason why steps of this thread donate nothing; no reason if they donate."""
    return _C.disabled_reason() or _C.switched_off()
