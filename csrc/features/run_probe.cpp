// Stops the run that it describes.
#include "features/run_probe.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "host/graphs.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

struct ThreadState {
  bool inspecting = false;
  std::optional<abi::CompiledGraph> found;
  bool recording = false;
  // Held, so that another graph cannot get an address seen before.
  std::vector<std::shared_ptr<const abi::HostCachedComputation>> graphs;
  std::size_t taken = 0;  // of graphs
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
    if (State().recording && run.runs_all) {
      try {
        Record(abi::ExecutableOf(run.run));
      } catch (const std::exception& error) {  // another class than expected
        DonationRegistry::Get().NoteError(error.what());
      }
    }
  }

  static void Record(std::shared_ptr<const abi::HostCachedComputation> graph) {
    auto& graphs = State().graphs;
    if (std::find(graphs.begin(), graphs.end(), graph) == graphs.end()) {
      graphs.push_back(std::move(graph));
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

void RecordGraphs(bool on) {
  State().recording = on;
  State().graphs.clear();
  State().taken = 0;
}

std::vector<abi::CompiledGraph> TakeGraphs() {
  std::vector<abi::CompiledGraph> result;
  for (auto& taken = State().taken; taken < State().graphs.size(); ++taken) {
    result.push_back(abi::DescribeGraph(*State().graphs[taken]));
  }
  return result;
}

}  // namespace torch_xla_donate
