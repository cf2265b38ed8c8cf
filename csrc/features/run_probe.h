// Describes a compiled graph without running it. The hook at MultiWait::Completer reads its text and memory and throws,
// which torch_xla treats as a run that failed to start.
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
// Describes and stops this thread's next run of a compiled graph. TakeInspected() ends this; nullopt if no run came.
void InspectNextRun();
std::optional<abi::CompiledGraph> TakeInspected();

}  // namespace torch_xla_donate
