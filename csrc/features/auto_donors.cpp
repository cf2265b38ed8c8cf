// Offers the inputs that no live tensor can reach.
#include "features/auto_donors.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

#include "features/outdated_tensors.h"
#include "features/switches.h"
#include "features/watched_inputs.h"
#include "host/graphs.h"
#include "host/tensors.h"
#include "registry/tallies.h"
#include "registry/watch.h"
#include "step/callbacks.h"
#include "step/donor_set.h"

namespace torch_xla_donate {

namespace {

// Whether automatic donation, or advice, needs this thread's last list.
thread_local bool needs_list = false;

// Why this process cannot donate automatically; null until a thread has computed it. A thread that needs the answer
// meanwhile computes it, too. Without an answer, it could not donate, so the donors of its first steps would depend on
// the speed of the other thread. If it waited, it might hold the GIL that the other needs.
std::atomic<const Reason*> process_obstacle{nullptr};

const Reason& ProcessObstacle() {
  const Reason* known = process_obstacle.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto found = std::make_unique<const Reason>(callbacks::PrepareAuto());
    if (process_obstacle.compare_exchange_strong(known, found.get(), std::memory_order_acq_rel)) {
      known = found.release();
    }
  }
  return *known;
}

using OldValues = std::unordered_set<const abi::TensorData*>;

// Holds the buffers that tensors held in the list, those they hold now, and then those of newer tensors. A buffer that
// other threads move meanwhile is in one of these sets until it is freed. Also holds what the pending graph of the
// random seed reads, which has no tensor. Returns nullopt if a view hides its buffer.
std::optional<Liveness> FindReach(DonorSet& step, const OldValues& old_values) {
  Liveness liveness(step.Context().graph->parameters_data);
  std::int64_t newest = 0;
  const auto hold = [&liveness, &newest](const abi::TensorData& data) {
    newest = std::max(newest, data.unique_id);
    liveness.Hold(data.handle.get());
    // A tensor with a buffer keeps only the node of that buffer. The graph of an output has become the step's.
    if (data.handle == nullptr && data.ir_value) {
      liveness.HoldGraph(data.ir_value);
    }
    return !abi::HasView(data);
  };
  const std::vector<std::shared_ptr<abi::TensorData>>& live = step.Live();
  const std::size_t listed = step.List().Size();
  const bool has_old_values = !old_values.empty();
  for (std::size_t i = 0; i < live.size(); ++i) {
    const abi::TensorData* const data = live[i].get();
    if (has_old_values && old_values.count(data) != 0) {
      continue;
    }
    if (data != nullptr && !hold(*data)) {
      return std::nullopt;
    }
    if (i < listed && (data == nullptr || step.List().BufferOf(i) != data->handle.get())) {
      liveness.Hold(step.List().BufferOf(i));
    }
  }
  const lazy::BackendDevice& device = step.Context().collection.device;
  for (const auto& data : abi::TensorsOf(step.Arena(), device, newest)) {
    if (!hold(*data)) {
      return std::nullopt;
    }
  }
  liveness.HoldGraph(abi::SeedOf(step.Arena(), device));
  return liveness;
}

// `torch.nonzero(t).t().size(1)` on dynamic shapes is a size with a graph that reads t, which no live tensor shows.
// torch_xla makes such sizes only with this setting, which it reads once. A program may unset it later. torch_xla
// itself reads the environment without the GIL in each step, too.
bool IsExperimental() noexcept {
  return std::getenv("XLA_EXPERIMENTAL") != nullptr;  // NOLINT(concurrency-mt-unsafe)
}
std::atomic<bool> was_experimental{IsExperimental()};  // as this library was loaded

bool MayMakeSymbolicSizes() noexcept {
  if (IsExperimental()) {
    was_experimental.store(true, std::memory_order_relaxed);
  }
  return was_experimental.load(std::memory_order_relaxed);
}

Reason Obstacle() {
  Reason why = ProcessObstacle();
  if (why.empty()) {
    why = abi::KeepsNodes()        ? ReasonCode::kKeptNodes
          : MayMakeSymbolicSizes() ? ReasonCode::kSymbolicSizes
                                   : ReasonCode::kNone;
  }
  return why;
}

}  // namespace

bool ListForAutoDonors() {
  needs_list = false;
  if (Watches(kInputs)) {
    TakeWatchedStep();  // of a step that has failed
  }
  if (!AutoDonates() && !Watches(kInputs)) {
    return false;
  }
  ProcessObstacle();  // makes a tensor, so it comes before the list
  needs_list = true;
  return true;
}

void ProposeAutoDonors(DonorSet& step) {
  if (!needs_list || DonationDisabled()) {
    return;
  }
  step.Live();
  const Gate& gate = step.Context().gate;
  if (AutoDonates() && gate.verdict == Gate::Verdict::kDonate) {
    const Reason why = Obstacle();
    std::optional<Liveness> reach = why.empty() ? FindReach(step, {}) : std::nullopt;
    if (!reach.has_value()) {
      Tallies::Get().NoteAutoRefusal(why.empty() ? ReasonCode::kSharedGraphs : why);
    }
    step.OfferInputs(std::move(reach));
  } else if (AutoDonates()) {
    Tallies::Get().NoteAutoRefusal(gate.reason);
  }
  if (Watches(kInputs) && Obstacle().empty()) {
    // Of a step that donates nothing automatically, outdated tensors still have old values, which it would have
    // replaced.
    const std::vector<std::int64_t> outputs = step.OutputIds();
    const std::optional<Liveness> reach = FindReach(step, OutdatedTensors::Get().OldValues());
    if (reach.has_value() && !outputs.empty()) {
      NoteInputs(step.Facts(reach), outputs, gate.reason, AutoDonates());
    }
  }
}

}  // namespace torch_xla_donate
