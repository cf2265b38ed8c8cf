// Pairs the inputs of a step with outputs as automatic donation would.
#include "features/watched_inputs.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "features/outdated_tensors.h"
#include "features/switches.h"
#include "host/graphs.h"
#include "host/process_mutex.h"
#include "registry/weak_keys.h"
#include "step/graph_arrays.h"
#include "step/size_pairing.h"
#include "step/watch.h"

namespace torch_xla_donate {

namespace {

std::optional<WatchedStep>& Last() {
  thread_local std::optional<WatchedStep> last;
  return last;
}

// Whether an earlier call had the buffer. Weak pointers, as a new buffer may get the address of a freed one.
bool WasSeen(const lazy::BackendDataPtr& buffer) {
  using Buffers = std::set<std::weak_ptr<const lazy::BackendData>, std::owner_less<>>;
  static Buffers* seen = new Buffers();
  static Pruner pruner;
  std::lock_guard<std::mutex> lock(ProcessMutex(MutexOf::kWatchedInputs));
  pruner.Prune(*seen);
  return !seen->insert(buffer).second;
}

}  // namespace

void WatchInputs(bool on) {
  if (on) {
    OutdatedTensors::FollowAliases();
  }
  SetWatch(kInputs, on ? kInputs : Watch{});
}
bool WatchesInputs() { return Watches(kInputs); }

void NoteInputs(const PlanRequest& request, const std::vector<std::int64_t>& outputs, const Reason& reason,
                bool automatic) {
  const std::vector<lazy::BackendDataPtr>& parameters = request.graph.parameters_data;
  const GraphArrays arrays = MeasureArrays(parameters, request.roots, request.sharded);
  const std::vector<bool> fits = FindFits(request, arrays);
  const std::size_t count = parameters.size();
  std::vector<bool> free(count), held(count);
  for (std::size_t i = 0; i < count; ++i) {
    const bool fit = fits[i] && !request.barred[i];
    free[i] = fit && !request.held[i] && !request.read_later[i];
    held[i] = fit && request.held[i];
  }
  const auto pair = [&](const std::vector<bool>& donors, const std::vector<bool>& offered,
                        const std::vector<std::optional<std::size_t>>& wanted) {
    return PairDonors({arrays.bytes, arrays.output_bytes, arrays.movable, donors, offered, wanted,
                       NearParameters(parameters, request.roots), KeepsOrder()});
  };
  const DonorPairs of_free = pair(request.donors, free, request.wanted);
  std::vector<bool> donors = request.donors;
  for (const std::size_t i : of_free.chosen) {
    donors[i] = true;
  }
  const DonorPairs of_held = pair(donors, held, of_free.successor);

  WatchedStep step{reason, automatic, {}, outputs};
  const auto add = [&](std::size_t i, InputUse use, const std::optional<std::size_t>& output) {
    const std::optional<abi::DataInfo> info = abi::InfoOf(*parameters[i]);
    step.inputs[i].use = use;
    step.inputs[i].tensor = !info.has_value() ? std::nullopt : std::optional(info->tensor_id);
    step.inputs[i].next = output.has_value() ? std::optional(outputs[*output]) : std::nullopt;
  };
  for (std::size_t i = 0; i < count; ++i) {
    step.inputs.push_back({arrays.arrays[i], InputUse::kOther, std::nullopt, std::nullopt, WasSeen(parameters[i]),
                           reinterpret_cast<std::uintptr_t>(parameters[i].get())});
    const bool is_own = request.donors[i] && request.own[i];
    add(i, is_own ? InputUse::kOwn : request.donors[i] ? InputUse::kMarked : InputUse::kOther, request.wanted[i]);
  }
  for (const std::size_t i : of_free.chosen) {
    add(i, InputUse::kFree, of_free.successor[i]);
  }
  for (const std::size_t i : of_held.chosen) {
    add(i, InputUse::kHeld, of_held.successor[i]);
  }
  Last() = std::move(step);
}

std::optional<WatchedStep> TakeWatchedStep() { return std::exchange(Last(), std::nullopt); }

}  // namespace torch_xla_donate
