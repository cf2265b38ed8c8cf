// Stops the run that it describes.
#include "features/run_probe.h"

#include <utility>

#include "host/graphs.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

struct ThreadState {
  bool inspecting = false;
  std::optional<abi::CompiledGraph> found;
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
  }
};

}  // namespace

StepObserver& RunProbeFeature() { return TheOnly<RunProbe>(); }

void InspectNextRun() { State() = {true, std::nullopt}; }

std::optional<abi::CompiledGraph> TakeInspected() {
  State().inspecting = false;
  return std::exchange(State().found, std::nullopt);
}

}  // namespace torch_xla_donate
