// Notes for advice how the program uses the inputs of a step: as donors, not at all, or held. Also the output that
// could take the memory, and the line that last wrote a tensor. Nothing is donated for it, and the graph stays as it
// is.
//
// Threads: the switch is for the process. Each thread keeps its last step.
// Errors: throws none itself.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "step/planner.h"

namespace torch_xla_donate {

struct WatchedInput {
  std::string array;  // with its sharding
  InputUse use;
  std::optional<std::int64_t> tensor, preferred_output;  // the alias ids of the tensor it is from, and of the output
  bool seen_before;                                      // an earlier watched step has read it
  std::uintptr_t buffer;  // only for comparison; as long as a tensor holds it, no other buffer has this number
};

struct WatchedStep {
  Reason reason;   // why this step donates nothing; empty if it may donate
  bool automatic;  // the step donates free inputs
  std::vector<WatchedInput> inputs;
  std::vector<std::int64_t> outputs;  // alias ids
};

void WatchInputs(bool on);
// Notes a step. `outputs` are the alias ids of its outputs.
void NoteInputs(const StepFacts& step, const std::vector<std::int64_t>& outputs, const Reason& reason, bool automatic);
// The last step of this thread since the last call.
std::optional<WatchedStep> TakeWatchedStep();

}  // namespace torch_xla_donate
