// Describes a compiled graph without running it: the hook at MultiWait::Completer reads its text and memory and throws,
// which torch_xla takes as a run that failed to start.
//
// Threads: belongs to the calling thread. Errors: InspectedRun ends the run.
#pragma once

#include <optional>
#include <stdexcept>

#include "host/graphs.h"

namespace torch_xla_donate {

struct InspectedRun : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The next run of a compiled graph on this thread is described and not run. Ends with TakeInspected(), which gives
// nothing if no run came.
void InspectNextRun();
std::optional<abi::CompiledGraph> TakeInspected();

}  // namespace torch_xla_donate
