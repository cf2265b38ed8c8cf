// Logs each run that begins: its graph, the Python stack, and the bytes that are live.
#include "features/run_log.h"

#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <unordered_set>
#include <utility>

#include "host/graphs.h"
#include "host/process_mutex.h"
#include "registry/weak_keys.h"
#include "step/graph_arrays.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

using Executable = std::weak_ptr<const abi::HostCachedComputation>;

struct Known {
  std::uint64_t number;
  bool described = false;  // a logged run has its header
};

std::atomic<bool> logs{false};
std::atomic<void*> list_arena{nullptr};  // the executor's only one

struct Log {
  std::mutex& mutex = ProcessMutex(MutexOf::kRunLog);
  std::vector<LoggedRun> runs;
  std::map<Executable, Known, std::owner_less<>> executables;
  std::uint64_t last_number = 0;  // of an executable
  Pruner pruner;
};
Log& TheLog() {
  static Log* log = new Log();
  return *log;
}

std::vector<StackFrame>& Stack() {
  thread_local std::vector<StackFrame> stack;
  return stack;
}

// Outputs of a run have no value before it, and donated buffers have none after theirs.
std::optional<std::int64_t> LiveBytes(const abi::Executor::Async& run) {
  void* arena = list_arena.load(std::memory_order_relaxed);
  if (arena == nullptr) {
    return std::nullopt;
  }
  std::int64_t bytes = 0;
  std::unordered_set<const lazy::BackendData*> seen;
  const auto add = [&](const lazy::BackendDataPtr& buffer) {
    if (buffer != nullptr && buffer->HasValue() && seen.insert(buffer.get()).second) {
      bytes += SizeOf(abi::DescribeBuffer(*buffer), /*unsharded=*/false).value_or(0);
    }
  };
  for (const auto& tensor : abi::TensorsSince(arena, run.device, std::numeric_limits<std::int64_t>::min())) {
    add(abi::BufferOf(*tensor));
  }
  for (const lazy::BackendDataPtr& parameter : run.parameters_data) {
    add(parameter);
  }
  return bytes;
}

// Without the texts a later run describes the executable.
void Describe(const abi::HostCachedComputation& executable, LoggedRun& run) {
  try {
    abi::CompiledGraph described = abi::DescribeGraph(executable);
    run.header = described.text.substr(0, described.text.find('\n'));
    run.memory = std::move(described.memory);
  } catch (const std::exception& error) {
    DonationRegistry::Get().NoteError(error.what());
  }
}

class RunLog : public StepObserver {
  bool NeedsLiveTensors(void* arena, const lazy::BackendDevice*) override {
    list_arena = arena;
    return false;
  }
  void AtBarrier(const lazy::LazyGraphExecutor&, bool has_locked_device) override {
    if (logs.load(std::memory_order_relaxed) && !has_locked_device) {
      Stack() = Callbacks().python_stack();
    }
  }
  void AtStart(RunContext& context) override {
    if (!logs.load(std::memory_order_relaxed)) {
      return;
    }
    try {
      const auto executable = abi::ExecutableOf(context.run);
      const bool has_donors = context.claim != nullptr || context.recorded;
      LoggedRun run{0, context.graph, has_donors, "", "", LiveBytes(context.run), Stack()};
      Log& log = TheLog();
      std::unique_lock<std::mutex> lock(log.mutex);
      log.pruner.Prune(log.executables);
      // Entries of a map stay where they are, and this run holds its executable.
      const auto [entry, is_new] = log.executables.try_emplace(executable, Known{log.last_number + 1});
      log.last_number += is_new ? 1 : 0;
      Known& known = entry->second;
      run.executable = known.number;
      if (!known.described) {
        lock.unlock();  // the text takes long, and its length is that of the HLO
        Describe(*executable, run);
        lock.lock();
      }
      // Two threads may both describe an executable; the first run in the log has the texts.
      if (std::exchange(known.described, known.described || !run.header.empty())) {
        run.header.clear();
        run.memory.clear();
      }
      log.runs.push_back(std::move(run));
      lock.unlock();
      Callbacks().record_runs_soon();
    } catch (const std::exception& error) {  // the run must not depend on the log
      DonationRegistry::Get().NoteError(error.what());
    }
  }
  bool AfterStep(const lazy::BackendDevice&) override {
    if (logs.load(std::memory_order_relaxed)) {
      Callbacks().record_runs();
    }
    return false;
  }
};

}  // namespace

StepObserver& RunLogFeature() { return TheOnly<RunLog>(); }

void LogRuns() { logs = true; }

std::vector<LoggedRun> TakeLoggedRuns() {
  const std::lock_guard<std::mutex> lock(TheLog().mutex);
  return std::exchange(TheLog().runs, {});
}

std::size_t LoggedExecutables() {
  const std::lock_guard<std::mutex> lock(TheLog().mutex);
  return TheLog().executables.size();
}

}  // namespace torch_xla_donate
