// What a feature sees of a step. Each feature is one file in features/ that derives a StepObserver and owns its own
// thread-local state, and one line in features/all.cpp. Observers are called in the order of that list.
//
// Ownership: observers live as long as the process. The contexts live as long as the call, a RunContext until its run
//   begins.
// Threads: all members but the functions given to OnEnd() are called on the thread that steps.
// Errors: NeedsLiveTensors(), CheckRun() and AtStart() may throw: the step is not begun, or the graph not run. What the
//   others throw ends donation for this step, but the step goes on.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "host/symbols.h"
#include "registry/registry.h"

namespace torch_xla_donate {

class Claim;
class DonorSet;

// What may become of a step's donors.
struct Gate {
  enum class Verdict { kDonate, kDryRun, kRefuse };
  Verdict verdict = Verdict::kDonate;
  Reason reason;       // of the first feature that closed it
  bool notify = true;  // whether the user gets to know of each donor

  // The user has disabled donation, and wants to know what it would have done.
  void DryRun(Reason why) { Close(Verdict::kDryRun, std::move(why), false); }
  // Also ends a dry run, as there is nothing to learn from it.
  void Refuse(Reason why, bool notify_user) { Close(Verdict::kRefuse, std::move(why), notify_user); }

 private:
  void Close(Verdict by, Reason why, bool notify_user) {
    if (verdict == Verdict::kDonate) {
      reason = std::move(why);
      notify = notify_user;
    }
    verdict = by;
  }
};

// A graph that the executor makes: of a step, of a read, of an operation in eager mode, or of a compiled function.
struct GraphContext {
  const lazy::LazyGraphExecutor& executor;
  const std::vector<lazy::Value>& roots;
  abi::Executor::SyncTensorCollection& collection;
  bool runs_all;      // not a read (print, .item(), .cpu()) and not a warm-up
  bool follows_list;  // the first since live tensors were listed
  bool is_step;       // of the live tensors listed last
  Gate gate;
  bool after_backward_thread = false;             // see backward_threads.cpp
  abi::Executor::PostOrderData* graph = nullptr;  // known in GraphKnown()
};

// What a step would have donated, in the order of the graph; without a Donor where torch_xla donates.
struct DryRun {
  struct Parameter {
    lazy::BackendDataPtr buffer;
    DonorPtr donor;
  };
  const abi::Executor::SyncTensorCollection* collection;  // for comparing, never followed
  std::uint64_t step;
  std::vector<Parameter> parameters;
};

// A graph that is about to run.
struct RunContext {
  abi::Executor::Async& run;
  const abi::Executor::SyncTensorCollection* collection;  // for comparing, never followed
  bool runs_all;                                          // as in GraphContext
  bool recorded = false;                                  // the registry has a step for it
  bool stopped = false;                                   // an observer will end it in AtStart()
  std::shared_ptr<Claim> claim = nullptr;                 // on its donors

  // Called when the run has ended, on the thread that ran it, in this order; the reason is empty if it has not failed.
  // Dropped with the context if the run never begins.
  void OnEnd(std::function<void(const Reason& failure)> function) { ends.push_back(std::move(function)); }
  std::vector<std::function<void(const Reason&)>> ends = {};
};

class StepObserver {
 public:
  virtual ~StepObserver() = default;

  // The executor is about to list the live tensors. Whether they have to be noted.
  virtual bool NeedsLiveTensors(void* /*arena*/, const lazy::BackendDevice* /*device*/) { return false; }
  // Outside a list a tensor is made while the hooks watch: the program goes on. Called if SeesTensors().
  virtual void TensorMade() {}
  virtual bool SeesTensors() const { return false; }

  virtual void BeforeGraph(GraphContext&) {}
  virtual void GraphKnown(GraphContext&) {}
  // Only for steps.
  virtual void ProposeDonors(DonorSet&) {}
  virtual void DryRunEnded(const DryRun&) {}

  // A thread waits for the device: before each read, each step and each run.
  virtual void AtBarrier(const lazy::LazyGraphExecutor&) {}
  virtual void CheckRun() {}
  virtual void BeforeRun(RunContext&) {}
  virtual void AtStart(RunContext&) {}
  // Whether there is something for HookCallbacks::step_ended.
  virtual bool AfterStep(const lazy::BackendDevice&) { return false; }
};

// The one object of a feature, as its function in features/all.cpp returns it.
template <typename Feature>
StepObserver& TheOnly() {
  static auto* feature = new Feature();
  return *feature;
}

// All of them, in order; see features/all.cpp.
const std::vector<StepObserver*>& Observers();

}  // namespace torch_xla_donate
