// The interface between a step and the features. Each feature is one file in features/, which derives a StepObserver
// and owns its thread-local state, and one line in features/all.cpp. Observers are called in that order.
//
// Ownership: observers are never freed. A context lives as long as the call, a RunContext until its run begins.
// Threads: the stepping thread calls all members, but another thread may call the functions given to OnEnd().
// Errors: NeedsLiveTensors(), AtBarrier(), CheckRun() and AtStart() may throw. Then the step does not begin, or the
//   graph does not run. The report shows an exception of another member, and the step continues.
#pragma once

#include <algorithm>
#include <exception>
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

// Decides whether a step donates.
struct Gate {
  enum class Verdict { kDonate, kDryRun, kRefuse };
  Verdict verdict = Verdict::kDonate;
  Reason reason;       // of the first feature that closed the gate
  bool notify = true;  // whether the user gets a report on each donor

  // The user has disabled donation and wants to see its effect.
  void DryRun(Reason why) { Close(Verdict::kDryRun, std::move(why), false); }
  // Also ends a dry run, because the step would not have donated anyway.
  void Refuse(Reason why, bool notify_user) { Close(Verdict::kRefuse, std::move(why), notify_user); }

 private:
  void Close(Verdict by, Reason why, bool notify_user) {
    if (verdict == Verdict::kDonate) {
      reason = std::move(why);
      notify = notify_user;
    }
    verdict = std::max(verdict, by);
  }
};

// A graph that the executor makes, for a step, a read, an operation in eager mode, or a compiled function.
struct GraphContext {
  const lazy::LazyGraphExecutor& executor;
  const std::vector<lazy::Value>& roots;
  abi::Executor::SyncTensorCollection& collection;
  bool runs_all;      // not a read (print, .item(), .cpu()) and not a warm-up
  bool follows_list;  // the first graph since the live tensors were listed
  bool is_step;       // a step of the live tensors listed last
  Gate gate;
  bool after_backward_thread = false;             // see backward_threads.cpp
  abi::Executor::PostOrderData* graph = nullptr;  // set before GraphKnown()
};

// The donations of a dry run, in the order of the graph. A parameter that torch_xla donates has no Donor.
struct DryRun {
  struct Parameter {
    lazy::BackendDataPtr buffer;
    DonorPtr donor;
  };
  const abi::Executor::SyncTensorCollection* collection;  // compared only, never dereferenced
  std::uint64_t step;
  std::vector<Parameter> parameters;
};

// A graph that is about to run.
struct RunContext {
  abi::Executor::Async& run;
  const abi::Executor::SyncTensorCollection* collection;  // compared only, never dereferenced
  bool runs_all;                                          // as in GraphContext
  bool recorded = false;                                  // the registry has a step for this run
  bool stopped = false;                                   // an observer will stop it in AtStart()
  std::shared_ptr<Claim> claim = nullptr;                 // the claim on its donors
  std::string graph = {};                                 // its hash in the registry, if it has donors
  std::exception_ptr failure = nullptr;                   // the run must not begin; torch_xla raises this error

  // Adds a function that the thread of the run calls after it, in the order of these calls. The reason is empty on
  // success. If the run never begins, the context drops the functions.
  void OnEnd(std::function<void(const Reason& failure)> function) { ends.push_back(std::move(function)); }
  std::vector<std::function<void(const Reason&)>> ends = {};
};

class StepObserver {
 public:
  virtual ~StepObserver() = default;

  // The executor is about to list the live tensors. Returns whether to record the list.
  virtual bool NeedsLiveTensors(void* /*arena*/, const lazy::BackendDevice* /*device*/) { return false; }
  // The program makes a tensor while the hooks watch, outside a list. Only called if SeesTensors().
  virtual void TensorMade() {}
  virtual bool SeesTensors() const { return false; }

  virtual void BeforeGraph(GraphContext&) {}
  virtual void GraphKnown(GraphContext&) {}
  // Only for steps.
  virtual void ProposeDonors(DonorSet&) {}
  virtual void DryRunEnded(const DryRun&) {}

  // A thread waits for the device, as before each read, step and run.
  // A thread that has locked the device must not take the GIL, because a thread with the GIL may wait for the device.
  virtual void AtBarrier(const lazy::LazyGraphExecutor&, bool /*has_locked_device*/) {}
  virtual void CheckRun(const std::vector<lazy::BackendDataPtr>& /*parameters*/) {}
  virtual void BeforeRun(RunContext&) {}
  virtual void AtStart(RunContext&) {}
  // Returns whether to call HookCallbacks::step_ended.
  virtual bool AfterStep(const lazy::BackendDevice&) { return false; }
};

// The only instance of a feature, for its function in features/all.cpp.
template <typename Feature>
StepObserver& TheOnly() {
  static auto* feature = new Feature();
  return *feature;
}

// All observers, in order; see features/all.cpp.
const std::vector<StepObserver*>& Observers();

}  // namespace torch_xla_donate
