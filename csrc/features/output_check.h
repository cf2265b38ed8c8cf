// The floating outputs of a thread's runs, noted so that the end of the step can look for NaN and infinities in them.
//
// A run is a step, or a call of a graph that torch.compile(backend="openxla") has made. switches.h says when.
//
// Ownership: the outputs are held until they are checked or dropped; of one that a later run reads, and may write over,
//   a copy on the host is held instead.
// Threads: each thread has its own notes. TakeBadOutputs() waits for the runs, so its caller must not hold the GIL.
// Errors: TakeBadOutputs() throws what the transfer from the device throws. The outputs of a run that fails are not
//   checked: torch_xla raises the failure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace torch_xla_donate {

struct BadOutput {
  bool compiled = false;  // of a compiled graph, not of a step
  std::size_t index = 0;  // among the outputs of its run, integers included
  std::size_t outputs = 0;
  std::string array;  // "f32[8,4]"
  std::int64_t values = 0;
  std::int64_t nans = 0;
  std::int64_t infs = 0;  // 0 unless asked for
};

// The outputs of this thread's runs since the last call that hold a NaN or, if asked for, an infinity. If there are
// any, the donors of the thread's last step may be used again: the search for the cause needs them.
std::vector<BadOutput> TakeBadOutputs(bool infs);
void DropNotedOutputs();

}  // namespace torch_xla_donate
