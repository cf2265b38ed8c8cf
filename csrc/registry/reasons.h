// Why a donor was not donated, or why a step has no donors: a code, and details for the sentence.
//
// torch_xla_donate/_report/reasons.py has the sentences.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

namespace torch_xla_donate {

enum class ReasonCode : std::uint8_t {
  kNone,
  // Of one donor:
  kAnotherBuffer,
  kHeldByOthers,
  kHasViews,
  kConstant,
  kReadEagerly,
  // Of one donor, found by Python:
  kNotRead,
  kClosedOver,
  kStillNeeded,
  kGraphBreak,
  kModuleHooks,
  kPartialGraph,
  kNoGraph,
  kUnknownOutputs,
  kHostOperations,
  kPerhapsReturned,  // details: the error
  kSavedForBackward,
  kEagerComputation,
  // Of a step and all its donors:
  kUnmatched,
  kIgnored,  // details: the setting
  kAutoSharding,
  kDisabled,
  kDebugNans,
  kDebugProcess,
  kKeptNodes,
  kSharedGraphs,
  kDeviceLocked,
  kTokenKept,    // details: the error
  kPlanFailed,   // details: the error
  kUnsupported,  // details: the error
  kFunctionalizationOff,
  // Of a step that failed or did not run:
  kGivenUp,
  kNotCompiled,
  kEarlierStepFailed,
  kFailed,  // details: the error
  kFailedForeign,
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
