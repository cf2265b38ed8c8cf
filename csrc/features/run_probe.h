// Describes the compiled graphs that a thread runs, or one without running it. For that the hook at
// MultiWait::Completer reads its text and memory and throws, which torch_xla treats as a run that failed to start.
//
// Threads: belongs to the calling thread. Errors: InspectedRun ends the run.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "host/graphs.h"
#include "host/process_mutex.h"

namespace torch_xla_donate {

struct InspectedRun : std::runtime_error {
  using std::runtime_error::runtime_error;
};
// Describes and stops this thread's next run of a compiled graph. TakeInspected() ends this; nullopt if no run came.
void InspectNextRun();
std::optional<abi::CompiledGraph> TakeInspected();

// The graphs that a thread runs while the record is open, each once and without those of reads. Records may overlap.
class GraphRecord : public std::enable_shared_from_this<GraphRecord> {
 public:
  void Open();
  // Ends the last Open() of this thread, and keeps the graphs.
  void Close();
  void Add(std::shared_ptr<const abi::HostCachedComputation> graph);
  // The graphs that were not returned before.
  std::vector<abi::CompiledGraph> Take();

 private:
  std::mutex& mutex_ = ProcessMutex(MutexOf::kGraphRecords);  // a thread may take what another one adds
  // Held, so that another graph cannot get an address seen before.
  std::vector<std::shared_ptr<const abi::HostCachedComputation>> graphs_;
  std::size_t taken_ = 0;
};

}  // namespace torch_xla_donate
