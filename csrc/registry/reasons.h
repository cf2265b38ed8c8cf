// Why a donor was not donated, or why a step has no donors: a code, and details for the sentence.
//
// torch_xla_donate/_report/reasons.py has the sentences.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

namespace torch_xla_donate {

// X(code, its name in Python)
#define TORCH_XLA_DONATE_REASON_CODES(X)                           \
  X(kNone, "none")                                                 \
  /* Of one donor: */                                              \
  X(kAnotherBuffer, "another_buffer")                              \
  X(kHeldByOthers, "held_by_others")                               \
  X(kHasViews, "has_views")                                        \
  X(kConstant, "constant")                                         \
  X(kReadEagerly, "read_eagerly")                                  \
  /* Of one donor, found by Python: */                             \
  X(kNotRead, "not_read")                                          \
  X(kClosedOver, "closed_over")                                    \
  X(kStillNeeded, "still_needed")                                  \
  X(kGraphBreak, "graph_break")                                    \
  X(kModuleHooks, "module_hooks")                                  \
  X(kPartialGraph, "partial_graph")                                \
  X(kNoGraph, "no_graph")                                          \
  X(kUnknownOutputs, "unknown_outputs")                            \
  X(kHostOperations, "host_operations")                            \
  X(kPerhapsReturned, "perhaps_returned") /* details: the error */ \
  X(kSavedForBackward, "saved_for_backward")                       \
  X(kEagerComputation, "eager_computation")                        \
  /* Of a step and all its donors: */                              \
  X(kUnmatched, "unmatched")                                       \
  X(kIgnored, "ignored") /* details: the setting */                \
  X(kAutoSharding, "auto_sharding")                                \
  X(kDisabled, "disabled")                                         \
  X(kDebugNans, "debug_nans")                                      \
  X(kDebugProcess, "debug_process")                                \
  X(kKeptNodes, "kept_nodes")                                      \
  X(kSymbolicSizes, "symbolic_sizes")                              \
  X(kSharedGraphs, "shared_graphs")                                \
  X(kDeviceLocked, "device_locked")                                \
  X(kTokenKept, "token_kept")    /* details: the error */          \
  X(kUnsupported, "unsupported") /* details: the error */          \
  X(kFunctionalizationOff, "functionalization_off")                \
  /* Of a step that failed or did not run: */                      \
  X(kGivenUp, "given_up")                                          \
  X(kNotCompiled, "not_compiled")                                  \
  X(kEarlierStepFailed, "earlier_step_failed")                     \
  X(kFailed, "failed") /* details: the error */                    \
  X(kFailedForeign, "failed_foreign")

enum class ReasonCode : std::uint8_t {
#define X(code, name) code,
  TORCH_XLA_DONATE_REASON_CODES(X)
#undef X
};

struct Reason {
  ReasonCode code = ReasonCode::kNone;
  std::string details;

  Reason() = default;
  Reason(ReasonCode of, std::string more = {}) : code(of), details(std::move(more)) {}

  bool empty() const { return code == ReasonCode::kNone; }
  friend bool operator<(const Reason& left, const Reason& right) {
    return std::tie(left.code, left.details) < std::tie(right.code, right.details);
  }
};

}  // namespace torch_xla_donate
