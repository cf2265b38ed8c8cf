// Stops the run that it describes.
#include "features/run_probe.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "host/graphs.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

struct ThreadState {
  bool inspecting = false;
  std::optional<abi::CompiledGraph> found;
  std::vector<std::shared_ptr<GraphRecord>> records;  // the open ones
};
ThreadState& State() {
  thread_local ThreadState state;
  return state;
}

class RunProbe : public StepObserver {
  void BeforeRun(RunContext& run) override { run.stopped = State().inspecting; }
  // The graph has reached the run. Throwing here keeps it from being scheduled.
  void AtStart(RunContext& run) override {
    if (run.stopped) {
      State().found = abi::DescribeGraph(*abi::ExecutableOf(run.run));
      throw InspectedRun("the graph was described, not run");
    }
    if (!State().records.empty() && run.runs_all) {
      try {
        const auto graph = abi::ExecutableOf(run.run);
        for (const auto& record : State().records) {
          record->Add(graph);
        }
      } catch (const std::exception& error) {  // another class than expected
        DonationRegistry::Get().NoteError(error.what());
      }
    }
  }
};

}  // namespace

StepObserver& RunProbeFeature() { return TheOnly<RunProbe>(); }

void InspectNextRun() {
  State().inspecting = true;
  State().found = std::nullopt;
}

std::optional<abi::CompiledGraph> TakeInspected() {
  State().inspecting = false;
  return std::exchange(State().found, std::nullopt);
}

void GraphRecord::Open() { State().records.push_back(shared_from_this()); }

void GraphRecord::Close() {
  auto& records = State().records;
  const auto last = std::find(records.rbegin(), records.rend(), shared_from_this());
  if (last != records.rend()) {
    records.erase(std::prev(last.base()));
  }
}

void GraphRecord::Add(std::shared_ptr<const abi::HostCachedComputation> graph) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(graphs_.begin(), graphs_.end(), graph) == graphs_.end()) {
    graphs_.push_back(std::move(graph));
  }
}

std::vector<abi::CompiledGraph> GraphRecord::Take() {
  std::vector<std::shared_ptr<const abi::HostCachedComputation>> graphs;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    graphs.assign(graphs_.begin() + static_cast<std::ptrdiff_t>(taken_), graphs_.end());
    taken_ = graphs_.size();
  }
  std::vector<abi::CompiledGraph> result;
  for (const auto& graph : graphs) {  // without the mutex: a text takes long
    result.push_back(abi::DescribeGraph(*graph));
  }
  return result;
}

}  // namespace torch_xla_donate
