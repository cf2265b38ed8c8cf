// Counts at the barrier, remembers the placeholders that are alive, and throws when a run begins.
#include "features/run_guard.h"

#include <memory>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "host/never_destroyed.h"
#include "host/process_mutex.h"
#include "registry/watch.h"

namespace torch_xla_donate {

namespace {

struct RunGuard {
  bool blocks = false, blocks_reads = false;
  std::uint64_t barriers = 0, runs = 0;
};
thread_local RunGuard run_guard;

// The hooks watch while it has any.
struct Placeholders {
  std::mutex& mutex = ProcessMutex(MutexOf::kPlaceholders);
  std::unordered_map<const lazy::BackendData*, std::weak_ptr<lazy::BackendData>> arrays;
};
Placeholders& ThePlaceholders() { return NeverDestroyed<Placeholders>(); }

[[noreturn]] void Throw() { throw std::runtime_error("Unexpected execution while a function is traced"); }

}  // namespace

void BlockRuns(bool on) {
  run_guard.blocks = on;
  run_guard.blocks_reads = false;
}

bool BlocksRuns() { return run_guard.blocks; }

bool BlockReads(bool on) { return std::exchange(run_guard.blocks_reads, on); }

std::uint64_t RunsBegun() { return run_guard.runs; }

std::uint64_t BarriersPassed() { return run_guard.barriers; }

void NotePlaceholder(const lazy::BackendDataPtr& array) {
  Placeholders& known = ThePlaceholders();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.arrays.insert_or_assign(array.get(), array);
  SetWatch(kEmpty, kEmpty);
}

void ThrowIfPlaceholder(const lazy::BackendData* array) {
  if (!Watches(kEmpty)) {
    return;
  }
  Placeholders& known = ThePlaceholders();
  const std::lock_guard<std::mutex> lock(known.mutex);
  const auto found = known.arrays.find(array);
  if (found != known.arrays.end() && !found->second.expired()) {
    throw std::runtime_error(
        "A placeholder has no value, so only lower() can use it. Give it to lower() as it is, and compute with it in "
        "the function that is lowered. See `python -m torch_xla_donate explain ahead`.");
  }
}

bool HasPlaceholders() {
  if (!Watches(kEmpty)) {
    return false;
  }
  Placeholders& known = ThePlaceholders();
  const std::lock_guard<std::mutex> lock(known.mutex);
  for (auto entry = known.arrays.begin(); entry != known.arrays.end();) {
    entry = entry->second.expired() ? known.arrays.erase(entry) : std::next(entry);
  }
  if (known.arrays.empty()) {
    SetWatch(kEmpty, 0);
  }
  return !known.arrays.empty();
}

void GuardBarrier() {
  run_guard.barriers += run_guard.blocks ? 1 : 0;
  if (run_guard.blocks_reads) {
    Throw();
  }
}

void GuardRun(const std::vector<lazy::BackendDataPtr>& parameters) {
  if (run_guard.blocks) {
    Throw();
  }
  ++run_guard.runs;
  // A node that a trace has left behind passes no other hook.
  for (const lazy::BackendDataPtr& parameter : parameters) {
    ThrowIfPlaceholder(parameter.get());
  }
}

}  // namespace torch_xla_donate
