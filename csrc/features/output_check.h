// The floating outputs of a thread's runs, noted so that the end of the step can check them for NaN and infinities.
//
// A run is a step, or a call of a graph that torch.compile(backend="openxla") has made. switches.h has the conditions.
//
// Ownership: holds the outputs until they are checked or dropped. If a later run reads an output, and may overwrite it,
//   holds a copy on the host instead.
// Threads: each thread has its own notes. TakeBadOutputs() waits for the runs, so the caller must not hold the GIL.
// Errors: TakeBadOutputs() throws errors of the transfer from the device. It does not check the outputs of a failed
//   run, because torch_xla raises that failure.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "step/phases.h"

namespace torch_xla_donate {

struct BadOutput {
  bool compiled = false;  // of a compiled graph, not of a step
  std::size_t index = 0;  // among the outputs of its run, integers included
  std::size_t outputs = 0;
  std::string array;  // "f32[8,4]"
  std::int64_t values = 0;
  std::int64_t nans = 0;
  std::int64_t infs = 0;  // 0 unless a mode checks for them
  std::weak_ptr<const lazy::BackendData> buffer;
};

// Returns the outputs of this thread's runs since the last call that hold a NaN or, if a mode checks for them, an
// infinity. If there are any, the program may use the donors of the thread's last step again to search for the cause.
std::vector<BadOutput> TakeBadOutputs();
void DropNotedOutputs();

// ---- Phases of a step ----

void NoteOutputs(RunContext& context);
bool HasNotedOutputs();

}  // namespace torch_xla_donate
