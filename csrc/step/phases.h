// What the phases of a step do beyond the choice of donors: one function for each, which the step calls. Their table is
// in features/phases.cpp.
//
// Ownership: a context lives as long as the call, a RunContext until its run begins.
// Threads: the stepping thread calls all functions, but another thread may call those given to OnEnd().
// Errors: ListBegins(), TensorMade(), AtBarrier(), CheckRun(), BeforeRun(), AtStart() and AfterStep() may throw, and
//   torch_xla's caller gets the exception. After an exception in BeforeGraph() or ProposeDonors() the step refuses its
//   marks and continues. The report shows an exception in another phase, and the step continues. A phase that is
//   noexcept takes no GIL, nor does BeforeRun(): when the interpreter ends, Python unwinds the stack of a daemon thread
//   that asks for it.
#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/symbols.h"
#include "registry/donor.h"
#include "step/size_pairing.h"

namespace torch_xla_donate {

class Claim;
class DonorSet;
class RunEnd;

// Decides whether a step donates.
struct Gate {
  enum class Verdict { kDonate, kDryRun, kRefuse };
  Verdict verdict = Verdict::kDonate;
  Reason reason;       // of the first switch that closed the gate
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

// The donations of a dry run, in the order of the graph. Holds no buffer, so that a step that fails to compile keeps
// nothing alive.
struct DryRun {
  std::uint64_t step;
  std::vector<std::pair<ArraySize, DonorPtr>> parameters;  // no Donor for a parameter that torch_xla donates
};

// A graph that the executor makes, for a step, a read, an operation in eager mode, or a compiled function.
struct GraphContext {
  const std::vector<lazy::Value>& roots;
  abi::Executor::SyncTensorCollection& collection;
  bool runs_all;      // not a read (print, .item(), .cpu()) and not a warm-up
  bool follows_list;  // the first graph since the live tensors were listed
  bool is_step;       // a step of the live tensors listed last
  bool is_eager;      // an operation in eager mode, if marks are known
  Gate gate;
  abi::Executor::PostOrderData* graph = nullptr;  // set before GraphKnown()
  std::optional<DryRun> dry_run = std::nullopt;   // if donation was disabled: what the step would have donated
};

// A graph that is about to run.
struct RunContext {
  abi::Executor::Async& run;
  bool runs_all;                                 // as in GraphContext
  bool recorded = false;                         // the registry has a step for this run
  bool stopped = false;                          // AtStart() will stop it
  std::optional<DryRun> dry_run = std::nullopt;  // of its graph
  std::shared_ptr<Claim> claim = nullptr;        // the claim on its donors
  std::string graph = {};                        // its hash in the registry, if it has donors
  std::exception_ptr failure = nullptr;          // the run must not begin; torch_xla raises this error

  // Adds a function that the thread of the run calls after it, in the order of these calls. The reason is empty on
  // success, and kGivenUp if the host has dropped the run.
  void OnEnd(std::function<void(const Reason& failure)> function);
  std::shared_ptr<RunEnd> end = nullptr;  // has these functions; null if there are none
};

namespace phases {

// The executor is about to list the live tensors. Returns whether to record the list.
bool ListBegins(const lazy::BackendDevice* device);
// The program makes a tensor while the hooks watch, outside a list.
void TensorMade();
void BeforeGraph(GraphContext& graph);
void GraphKnown(GraphContext& graph) noexcept;
// Only for steps, after the marks have been proposed.
void ProposeDonors(DonorSet& donors);
// A thread waits for the device, as before each read, step and run.
// A thread that has locked the device must not take the GIL, because a thread with the GIL may wait for the device. A
// step whose donors are claimed runs no Python before its run, because a finalizer may make a graph of its own.
void AtBarrier(bool may_run_python);
void CheckRun(const std::vector<lazy::BackendDataPtr>& parameters);
void BeforeRun(RunContext& run);
void AtStart(RunContext& run);
// Returns whether to call callbacks::StepEnded().
bool AfterStep();

// Does nothing but in the build of `make faults`, where test/faults may throw here.
#ifdef TORCH_XLA_DONATE_FAULTS
void Reach(const char* phase);
#else
inline void Reach(const char* /*phase*/) {}
#endif

}  // namespace phases

}  // namespace torch_xla_donate
