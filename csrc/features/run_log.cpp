// Logs each run that begins: its graph, the Python stack, and the bytes that are live.
#include "features/run_log.h"

#include <atomic>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <utility>

#include "host/graphs.h"
#include "step/graph_arrays.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

using Executable = std::weak_ptr<const abi::HostCachedComputation>;

std::atomic<bool> logs{false};
std::atomic<void*> list_arena{nullptr};  // the executor's only one

struct Log {
  std::mutex mutex;
  std::vector<LoggedRun> runs;
  std::map<Executable, std::uint64_t, std::owner_less<>> executables;
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

class RunLog : public StepObserver {
  bool NeedsLiveTensors(void* arena, const lazy::BackendDevice*) override {
    list_arena = arena;
    return false;
  }
  // Later the executor holds the device's lock, which a thread with the GIL may wait for.
  void AtBarrier(const lazy::LazyGraphExecutor&) override {
    if (logs.load(std::memory_order_relaxed)) {
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
      bool is_new = false;
      {
        const std::lock_guard<std::mutex> lock(log.mutex);
        const auto [found, added] = log.executables.emplace(executable, log.executables.size() + 1);
        run.executable = found->second;
        is_new = added;
      }
      if (is_new) {
        abi::CompiledGraph described = abi::DescribeGraph(*executable);
        run.header = described.text.substr(0, described.text.find('\n'));
        run.memory = std::move(described.memory);
      }
      {
        const std::lock_guard<std::mutex> lock(log.mutex);
        log.runs.push_back(std::move(run));
      }
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

}  // namespace torch_xla_donate
