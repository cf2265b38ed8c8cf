// Counts at the barrier, and throws when a run begins.
#include "features/run_guard.h"

#include <atomic>
#include <stdexcept>
#include <utility>

#include "host/verify.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

// torch_xla's only executor, once it has passed a barrier.
std::atomic<const lazy::LazyGraphExecutor*> host_executor{nullptr};

struct ThreadState {
  bool blocks = false, blocks_reads = false;
  std::uint64_t barriers = 0, runs = 0;
};
ThreadState& State() {
  thread_local ThreadState state;
  return state;
}

class RunGuard : public StepObserver {
  void AtBarrier(const lazy::LazyGraphExecutor& executor, bool /*has_locked_device*/) override {
    host_executor.store(&executor, std::memory_order_relaxed);
    State().barriers += State().blocks ? 1 : 0;
    if (State().blocks_reads) {
      Throw();
    }
  }
  void CheckRun(const std::vector<lazy::BackendDataPtr>& /*parameters*/) override {
    if (State().blocks) {
      Throw();
    }
    ++State().runs;
  }
  [[noreturn]] static void Throw() { throw std::runtime_error("Unexpected execution while a function is traced"); }
};

}  // namespace

StepObserver& RunGuardFeature() { return TheOnly<RunGuard>(); }

void BlockRuns(bool on) {
  State().blocks = on;
  State().blocks_reads = false;
}

bool BlockReads(bool on) { return std::exchange(State().blocks_reads, on); }

bool BlocksRuns() { return State().blocks; }

std::uint64_t RunsBegun() { return State().runs; }

std::uint64_t BarriersPassed() { return State().barriers; }

void VerifyExecutor(bool eager_mode, bool allow_execution) {
  const lazy::LazyGraphExecutor* executor = host_executor.load(std::memory_order_relaxed);
  if (executor == nullptr) {
    throw std::runtime_error("no executor has passed the barrier");
  }
  abi::VerifyExecutor(*executor, eager_mode, allow_execution);
}

}  // namespace torch_xla_donate
