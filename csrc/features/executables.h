// The one record of which executables ran. Two clients read it:
//   - lower(), and dumps in tests: the texts of the graphs that a thread runs, or of one that it does not run;
//   - `python -m torch_xla_donate verify`: each run, with its stack.
// Without a client, a run passes at the cost of a test.
//
// Ownership: executables are noted weakly, but a GraphRecord holds its own. The log holds texts and numbers, no tensor.
// Threads: any; what the comments say of a thread belongs to it. Errors: InspectedRun ends the run that it describes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "host/graphs.h"
#include "step/callbacks.h"
#include "step/phases.h"

namespace torch_xla_donate {

// ---- Texts of graphs ----

struct InspectedRun : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// The graphs that a thread runs while the record is open, each once and without those of reads. Records may overlap.
//
// A record may stop the runs: the hook at MultiWait::Completer notes the graph and throws, which torch_xla treats as a
// run that failed to start.
class GraphRecord : public std::enable_shared_from_this<GraphRecord> {
 public:
  explicit GraphRecord(bool stops) : stops_runs(stops) {}
  const bool stops_runs;
  void Open();
  // Ends the last Open() of this thread, and keeps the graphs.
  void Close();
  // The graphs that were not returned before.
  std::vector<abi::CompiledGraph> Take();

 private:
  friend void NoteExecutable(RunContext& run);
  // Held, so that another graph cannot get an address seen before.
  std::vector<std::shared_ptr<const abi::HostCachedComputation>> graphs_;
  std::size_t taken_ = 0;
};

// ---- The log of runs ----

struct LoggedRun {
  std::uint64_t executable;       // counted from 1, in the order of their first runs
  std::string graph;              // its hash in the registry's steps; empty if XLA was offered no donor
  bool has_donors;                // whether the registry has a step for it
  std::string header;             // the first line of its optimised HLO; only one run of it has the line
  std::string memory;             // XLA's statistics of its memory; the same
  std::vector<StackFrame> stack;  // of the Python call that runs it, innermost first
};
// From now on logs each run. Cannot be switched off.
void LogRuns();
// Returns and clears the log, oldest first.
std::vector<LoggedRun> TakeLoggedRuns();

// How many executables are noted.
std::size_t NotedExecutables();

// ---- Phases of a step ----

// A thread without locks waits, so Python's stack can be read.
void NoteStack();
// Whether a record stops the run.
bool IsInspected();
void NoteExecutable(RunContext& run);
// Has Python record the logged runs.
void RecordRuns();

}  // namespace torch_xla_donate
