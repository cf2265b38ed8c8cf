// Pairs the inputs of a step with outputs as automatic donation would.
#include "features/watched_inputs.h"

#include <memory>
#include <set>
#include <utility>

#include "features/outdated_tensors.h"
#include "host/graphs.h"
#include "host/never_destroyed.h"
#include "host/process_mutex.h"
#include "registry/watch.h"
#include "registry/weak_keys.h"

namespace torch_xla_donate {

namespace {

thread_local std::optional<WatchedStep> last_step;

// Whether an earlier call had the buffer. Weak pointers, as a new buffer may get the address of a freed one.
bool WasSeen(const lazy::BackendDataPtr& buffer) {
  using Buffers = std::set<std::weak_ptr<const lazy::BackendData>, std::owner_less<>>;
  Buffers& seen = NeverDestroyed<Buffers>();
  static Pruner pruner;
  std::lock_guard<std::mutex> lock(ProcessMutex(MutexOf::kWatchedInputs));
  pruner.Prune(seen);
  return !seen.insert(buffer).second;
}

}  // namespace

void WatchInputs(bool on) {
  if (on) {
    OutdatedTensors::FollowAliases();
  }
  SetWatch(kInputs, on ? kInputs : Watch{});
}

void NoteInputs(const StepFacts& step, const std::vector<std::int64_t>& outputs, const Reason& reason, bool automatic) {
  const GraphArrays arrays = step.Measure();
  const StepPlan plan = step.PlanFor(arrays);
  WatchedStep watched{reason, automatic, {}, outputs};
  for (std::size_t i = 0; i < step.inputs.size(); ++i) {
    const lazy::BackendDataPtr& buffer = step.graph.parameters_data[i];
    WatchedInput input{arrays.arrays[i], plan.uses[i],    std::nullopt,
                       std::nullopt,     WasSeen(buffer), reinterpret_cast<std::uintptr_t>(buffer.get())};
    if (const std::optional<abi::DeviceDataInfo> info = abi::InfoOf(*buffer)) {
      input.tensor = info->tensor_id;
    }
    if (plan.output_of[i].has_value()) {
      input.preferred_output = outputs[*plan.output_of[i]];
    }
    watched.inputs.push_back(std::move(input));
  }
  last_step = std::move(watched);
}

std::optional<WatchedStep> TakeWatchedStep() { return std::exchange(last_step, std::nullopt); }

}  // namespace torch_xla_donate
