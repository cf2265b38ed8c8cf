// Notes each executable at the start of its runs.
#include "features/executables.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <map>
#include <utility>

#include "host/never_destroyed.h"
#include "host/process_mutex.h"
#include "registry/tallies.h"
#include "registry/weak_keys.h"
#include "step/donor_set.h"

namespace torch_xla_donate {

namespace {

using Executable = std::shared_ptr<const abi::HostCachedComputation>;

std::atomic<bool> logs{false};  // whether the process logs runs

struct Note {
  std::uint64_t number;
  bool described = false;  // a logged run has its header
};
struct Record {
  std::mutex& mutex = ProcessMutex(MutexOf::kExecutables);
  std::map<Executable::weak_type, Note, std::owner_less<>> notes;
  std::uint64_t last_number = 0;
  Pruner pruner;
  std::vector<LoggedRun> runs;

  // Call it with the mutex. Entries of a map stay where they are, while the run holds the executable.
  Note& Of(const Executable& executable) {
    pruner.Prune(notes);
    const auto [entry, is_new] = notes.try_emplace(executable, Note{last_number + 1});
    last_number += is_new ? 1 : 0;
    return entry->second;
  }
};
Record& TheRecord() { return NeverDestroyed<Record>(); }

struct Recording {
  std::vector<std::shared_ptr<GraphRecord>> records;  // the open ones
  std::vector<StackFrame> stack;
};
thread_local Recording recording;

// Without the texts a later run describes the executable.
void Describe(const abi::HostCachedComputation& executable, LoggedRun& run) {
  try {
    abi::CompiledGraph described = abi::DescribeGraph(executable);
    run.header = described.text.substr(0, described.text.find('\n'));
    run.memory = std::move(described.memory);
  } catch (const std::exception& error) {
    Tallies::Get().NoteError(error.what());
  }
}

void Log(const RunContext& context, const Executable& executable) {
  const bool has_donors = context.claim != nullptr || context.recorded;
  LoggedRun run{0, context.graph, has_donors, "", "", recording.stack};
  Record& record = TheRecord();
  std::unique_lock<std::mutex> lock(record.mutex);
  Note& note = record.Of(executable);
  run.executable = note.number;
  if (!note.described) {
    lock.unlock();  // the text takes long, and its length is that of the HLO
    Describe(*executable, run);
    lock.lock();
  }
  // Two threads may both describe an executable; the first run in the log has the texts.
  if (note.described) {
    run.header.clear();
    run.memory.clear();
  }
  const bool has_texts = !run.header.empty();
  record.runs.push_back(std::move(run));
  note.described = note.described || has_texts;
  lock.unlock();
  callbacks::RecordRunsSoon();
}

}  // namespace

void NoteExecutable(RunContext& context) {
  const bool is_logged = logs.load(std::memory_order_relaxed) && !context.stopped;
  const bool is_recorded = !recording.records.empty() && context.runs_all;
  if (!is_logged && !is_recorded && context.claim == nullptr && !context.stopped) {
    return;
  }
  try {  // the run must not depend on its record
    const Executable executable = abi::ExecutableOf(context.run);
    if (context.claim != nullptr) {
      context.claim->NoteExecutable(executable);
    }
    if (is_recorded) {
      const std::lock_guard<std::mutex> lock(TheRecord().mutex);
      for (const auto& record : recording.records) {
        auto& graphs = record->graphs_;
        if (record->stops_runs == context.stopped &&
            std::find(graphs.begin(), graphs.end(), executable) == graphs.end()) {
          graphs.push_back(executable);
        }
      }
    }
    if (is_logged) {
      Log(context, executable);
    }
  } catch (const std::exception& error) {
    if (context.stopped) {
      throw;
    }
    Tallies::Get().NoteError(error.what());
  }
  if (context.stopped) {
    throw InspectedRun("the graph was described, not run");
  }
}

bool IsInspected() {
  const auto stops = [](const auto& record) { return record->stops_runs; };
  return std::any_of(recording.records.begin(), recording.records.end(), stops);
}

void GraphRecord::Open() { recording.records.push_back(shared_from_this()); }

void GraphRecord::Close() {
  auto& records = recording.records;
  const auto last = std::find(records.rbegin(), records.rend(), shared_from_this());
  if (last != records.rend()) {
    records.erase(std::prev(last.base()));
  }
}

std::vector<abi::CompiledGraph> GraphRecord::Take() {
  std::vector<Executable> graphs;
  {
    const std::lock_guard<std::mutex> lock(TheRecord().mutex);
    graphs.assign(graphs_.begin() + static_cast<std::ptrdiff_t>(taken_), graphs_.end());
    taken_ = graphs_.size();
  }
  std::vector<abi::CompiledGraph> result;
  for (const Executable& graph : graphs) {  // without the mutex: a text takes long
    result.push_back(abi::DescribeGraph(*graph));
  }
  return result;
}

void LogRuns() { logs = true; }

std::vector<LoggedRun> TakeLoggedRuns() {
  const std::lock_guard<std::mutex> lock(TheRecord().mutex);
  return std::exchange(TheRecord().runs, {});
}

std::size_t NotedExecutables() {
  const std::lock_guard<std::mutex> lock(TheRecord().mutex);
  return TheRecord().notes.size();
}

void NoteStack() {
  if (logs.load(std::memory_order_relaxed)) {
    try {
      recording.stack = callbacks::PythonStack();
    } catch (const std::exception& error) {  // the step has given its outputs arrays, and must run
      Tallies::Get().NoteError(error.what());
    }
  }
}

void RecordRuns() {
  if (logs.load(std::memory_order_relaxed)) {
    callbacks::RecordRuns();
  }
}

}  // namespace torch_xla_donate
