// Notes new executables with donors. Their text shows copies of donated buffers, and Python reads it.
#include "features/donated_copies.h"

#include <atomic>
#include <memory>
#include <set>

#include "host/graphs.h"
#include "registry/weak_keys.h"
#include "step/donor_set.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

std::atomic<bool> looks{false};

struct ThreadState {
  std::set<std::weak_ptr<const abi::HostCachedComputation>, std::owner_less<>> seen;
  Pruner pruner;
  bool has_new = false;
};
ThreadState& State() {
  thread_local ThreadState state;
  return state;
}

class DonatedCopies : public StepObserver {
  void AtStart(RunContext& context) override {
    if (!looks.load(std::memory_order_relaxed) || context.claim == nullptr || !context.claim->HasDonors()) {
      return;
    }
    try {
      State().pruner.Prune(State().seen);
      if (State().seen.insert(abi::ExecutableOf(context.run)).second) {
        State().has_new = true;
      }
    } catch (const std::exception& error) {  // another class than expected
      DonationRegistry::Get().NoteError(error.what());
    }
  }
  bool AfterStep(const lazy::BackendDevice&) override { return HasNewGraphs(); }
};

}  // namespace

StepObserver& DonatedCopiesFeature() { return TheOnly<DonatedCopies>(); }

void LookForCopies() { looks = true; }
bool HasNewGraphs() { return State().has_new; }
void ForgetNewGraphs() { State().has_new = false; }
std::size_t GraphsLookedAt() { return State().seen.size(); }

}  // namespace torch_xla_donate
