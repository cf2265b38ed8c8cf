// Offers the inputs that no live tensor can reach.
#include "features/auto_donors.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "features/outdated_tensors.h"
#include "features/switches.h"
#include "host/graphs.h"
#include "host/tensors.h"
#include "step/callbacks.h"
#include "step/donor_set.h"
#include "step/observer.h"
#include "step/watch.h"

namespace torch_xla_donate {

namespace {

std::atomic<bool> is_default{false};
std::atomic<bool> multi_process{false};

// How many wishes for automatic donation there are in all.
void CountWish(int change) {
  static std::mutex* mutex = new std::mutex();
  static int wishes = 0;
  std::lock_guard<std::mutex> lock(*mutex);
  wishes += change;
  SetWatch(kAutomatic, wishes > 0 ? kAutomatic : Watch{});
}

struct ThreadWishes {
  std::vector<bool> pushed;  // by this thread's contexts
  void* arena = nullptr;     // of the executor that has made the last list, if it was made for automatic donation
};
ThreadWishes& Wishes() {
  thread_local ThreadWishes wishes;
  return wishes;
}

// Why automatic donation cannot be had in this process. Asked once; nobody waits for the answer, as the thread that
// asks takes the GIL, which others may hold here.
struct ProcessObstacle {
  std::atomic<bool> asked{false};
  std::atomic<bool> known{false};
  Reason reason;  // written before it is known, and never again
};
ProcessObstacle& TheObstacle() {
  static ProcessObstacle* value = new ProcessObstacle();
  return *value;
}

bool IsObstacleKnown() {
  ProcessObstacle& obstacle = TheObstacle();
  if (!obstacle.asked.exchange(true)) {
    try {
      obstacle.reason = Callbacks().prepare_auto();
    } catch (...) {
      obstacle.asked.store(false);
      throw;
    }
    obstacle.known.store(true, std::memory_order_release);
  }
  return obstacle.known.load(std::memory_order_acquire);
}

// What was held when the list was made, what is held now, and what has been made since: whatever another thread does
// meanwhile, a buffer is in one of them until nobody has it. Nothing if a view hides what it holds.
std::optional<Liveness> FindReach(const DonorSet& step) {
  Liveness liveness(step.Context().graph->parameters_data);
  const auto hold = [&liveness](const abi::TensorData* data, const lazy::BackendData* listed) {
    if (data == nullptr) {
      liveness.Hold(listed);
      return true;
    }
    liveness.Hold(data->handle.get());
    if (listed != data->handle.get()) {
      liveness.Hold(listed);
    }
    // A tensor that has a buffer keeps no other graph than the node of that buffer, and the graph of an output has
    // become the step's.
    if (data->handle == nullptr && data->ir_value) {
      liveness.HoldGraph(data->ir_value);
    }
    return !abi::HasView(*data);
  };
  for (std::size_t i = 0; i < step.Live().size(); ++i) {
    if (!hold(step.Live()[i].get(), step.List().BufferOf(i))) {
      return std::nullopt;
    }
  }
  const lazy::BackendDevice& device = step.Context().collection.device;
  for (const auto& data : abi::TensorsSince(Wishes().arena, device, step.List().Newest())) {
    if (!hold(data.get(), nullptr)) {
      return std::nullopt;
    }
  }
  return liveness;
}

std::optional<Liveness> FindReachOrSayWhy(const DonorSet& step) {
  Reason why = TheObstacle().reason;
  if (why.empty() && abi::KeepsNodes()) {
    why = ReasonCode::kKeptNodes;
  }
  std::optional<Liveness> found = why.empty() ? FindReach(step) : std::nullopt;
  if (!found.has_value()) {
    DonationRegistry::Get().NoteAutoRefusal(why.empty() ? ReasonCode::kSharedGraphs : why);
  }
  return found;
}

// The compiler alone chooses shardings, so only the outcome shows which donors are of use.
void Learn(const PlanResult& plan, const std::vector<DonorPtr>& donors) {
  // Not where other processes must compile the same graph: the next step may come before this or after it.
  if (multi_process.load(std::memory_order_relaxed)) {
    return;
  }
  std::vector<std::size_t> of_no_use;
  for (std::size_t i = 0; i < donors.size(); ++i) {
    if (donors[i]->state == DonorState::kUnusable) {
      of_no_use.push_back(plan.choice->parameters[i]);
    }
  }
  if (!of_no_use.empty()) {
    DonorPlanner::Get().OfNoUse(plan.plan, of_no_use);
  }
}

class AutoDonors : public StepObserver {
  // The question comes before the list, as it makes a tensor.
  bool NeedsLiveTensors(void* arena, const lazy::BackendDevice*) override {
    Wishes().arena = nullptr;
    const bool needs = AutoDonates() && IsObstacleKnown();
    if (needs) {
      Wishes().arena = arena;
    }
    return needs;
  }
  void BeforeGraph(GraphContext& graph) override {
    if (graph.follows_list && graph.runs_all) {
      DonorPlanner::Get().BeginStep(graph.collection.device);
    }
  }
  void ProposeDonors(DonorSet& step) override {
    if (AutoDonates() && Wishes().arena != nullptr && !DonationDisabled()) {
      step.OfferInputs(&FindReachOrSayWhy, abi::IsSpmd(step.Context().collection.device) ? &Learn : nullptr);
    }
  }
};

}  // namespace

StepObserver& AutoDonorsFeature() { return TheOnly<AutoDonors>(); }

void SetAutoDonate(bool on) {
  if (on) {
    OutdatedTensors::FollowAliases();
  }
  if (is_default.exchange(on) != on) {
    CountWish(on ? 1 : -1);
  }
}

bool AutoDonateIsDefault() { return is_default.load(); }

void PushAutoDonate(bool on) {
  if (on) {
    OutdatedTensors::FollowAliases();
    CountWish(1);
  }
  Wishes().pushed.push_back(on);
}

std::size_t AutoDonateDepth() { return Wishes().pushed.size(); }

void PopAutoDonate(std::size_t depth) {
  std::vector<bool>& pushed = Wishes().pushed;
  while (pushed.size() > depth) {  // not where a context is left on another thread than it was entered on
    if (pushed.back()) {
      CountWish(-1);
    }
    pushed.pop_back();
  }
}

bool AutoDonates() {
  if (!Watches(kAutomatic)) {
    return false;
  }
  const std::vector<bool>& pushed = Wishes().pushed;
  return pushed.empty() ? is_default.load(std::memory_order_relaxed) : pushed.back();
}

void SetMultiProcess(bool on) { multi_process.store(on, std::memory_order_relaxed); }

}  // namespace torch_xla_donate
