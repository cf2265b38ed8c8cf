// The floating outputs of a thread's runs, noted so that the end of the step can look for NaN and infinities in them.
//
// A run is a step, or a call of a graph that torch.compile(backend="openxla") has made. Whoever switches the checks on
// (debug_nans) does so in sync_hooks; here is what they need.
//
// Ownership: the outputs are held until they are checked or dropped; of one that a later run reads, and may write over,
//   a copy on the host is held instead.
// Threads: each thread has its own notes. Check() waits for the runs, so its caller must not hold the GIL.
// Errors: Note() and Watch() throw nothing of their own; Check() throws what the transfer from the device throws. The
//   outputs of a run that fails are not checked: torch_xla raises the failure.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "host/torch_xla_abi.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

struct BadOutput {
  bool compiled = false;  // of a compiled graph, not of a step
  std::size_t index = 0;  // among the outputs of its run, integers included
  std::size_t outputs = 0;
  std::string array;  // "f32[8,4]"
  std::int64_t values = 0;
  std::int64_t nans = 0;
  std::int64_t infs = 0;  // 0 unless asked for
};

class OutputCheck {
 public:
  static OutputCheck& OfThisThread();

  // A run is about to be scheduled, on this thread.
  void Note(abi::Executor::Async& run);
  // The function of the run that was noted last, with its end made known; any other as it is.
  std::function<void()> Watch(const lazy::MultiWait* runner, std::function<void()> run);

  bool Empty() const { return runs_.empty(); }
  void Drop();
  // The outputs of all noted runs that hold a NaN or, if asked for, an infinity. The notes are gone afterwards.
  std::vector<BadOutput> Check(bool infs);

 private:
  struct Output {
    std::size_t index;
    std::string array;
    at::ScalarType dtype;
    lazy::BackendDataPtr buffer;
    at::Tensor copy;  // defined once it has been fetched
  };
  struct Run {
    bool compiled = false;
    std::size_t outputs = 0;
    std::vector<Output> floating;
    std::shared_future<void> ended;
  };

  static void Fetch(Output& output);
  void FetchWhatIsRead(const std::vector<lazy::BackendDataPtr>& parameters);

  std::vector<Run> runs_;
  const lazy::MultiWait* runner_ = nullptr;
  std::shared_ptr<std::promise<void>> end_;  // of the last run, until its function is wrapped
};

}  // namespace torch_xla_donate
