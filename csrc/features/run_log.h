// The runs of graphs that have begun, for `python -m torch_xla_donate verify`.
//
// Ownership: the log holds texts and numbers, no tensor. Threads: any. Errors: throws none itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "step/callbacks.h"

namespace torch_xla_donate {

struct LoggedRun {
  std::uint64_t executable;                // counted from 1, in the order of their first runs
  std::string graph;                       // its hash in the registry's steps; empty if XLA was offered no donor
  bool has_donors;                         // whether the registry has a step for it
  std::string header;                      // the first line of its optimised HLO; only one run of it has the line
  std::string memory;                      // XLA's statistics of its memory; the same
  std::optional<std::int64_t> live_bytes;  // of all live arrays on its device, as one device counts them
  std::vector<StackFrame> stack;           // of the Python call that runs it, innermost first
};

// From now on logs each run. Cannot be switched off.
void LogRuns();
// Returns and clears the log, oldest first.
std::vector<LoggedRun> TakeLoggedRuns();
// How many executables the log distinguishes.
std::size_t LoggedExecutables();

}  // namespace torch_xla_donate
