// Describes the compiled graphs that a thread runs, or one without running it. For that the hook at
// MultiWait::Completer reads its text and memory and throws, which torch_xla treats as a run that failed to start.
//
// Threads: belongs to the calling thread. Errors: InspectedRun ends the run.
#pragma once

#include <optional>
#include <stdexcept>
#include <vector>

#include "host/graphs.h"

namespace torch_xla_donate {

struct InspectedRun : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Describes and stops this thread's next run of a compiled graph. TakeInspected() ends this; nullopt if no run came.
void InspectNextRun();
std::optional<abi::CompiledGraph> TakeInspected();

// Whether to record the graphs that this thread runs, without those of reads.
void RecordGraphs(bool on);
// The graphs that ran for the first time since this thread began to record, without those returned before.
std::vector<abi::CompiledGraph> TakeGraphs();

}  // namespace torch_xla_donate
