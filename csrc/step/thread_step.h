// One thread's step, and the functions that the hooks call in its phases.
//
// A step (torch_xla.sync(), xm.mark_step()) calls the members of ThreadStep in the order in which they stand here. The
// hooks that call them are in features/intercepts.cpp, in the same order.
//
// Ownership: the thread's step owns the list, and the claim until the run begins. Then the run owns the claim.
// Threads: belongs to one thread.
// Errors: an exception in a phase, or a lack of memory, is caught where torch_xla cannot handle it. Before the
//   donors are claimed, the step then runs without donation. After that, its run does not begin, and torch_xla raises
//   the error.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "step/donor_set.h"
#include "step/phases.h"

namespace torch_xla_donate {

enum class StepPhase {
  kIdle,
  kListing,   // inside ForAllDeviceContexts
  kListed,    // no graph has been made from the list yet
  kOrdering,  // inside RunPostOrder, which itself passes the barrier to wait for parameters
  kClaimed,   // donors are chosen, the graph is being compiled
  kCompiled,  // the executor has passed the barrier
  kPrepared,  // Async::Async has passed: the graph will run
};

class ThreadStep {
 public:
  static ThreadStep& Get();

  // While the object lives, the executor lists the live tensors.
  class Listing {
   public:
    Listing(void* arena, const lazy::BackendDevice* device);
    ~Listing();
    Listing(const Listing&) = delete;
    Listing& operator=(const Listing&) = delete;
  };
  void TensorMade(const std::shared_ptr<abi::TensorData>& data);
  // A tensor's handle is read. Returns whether the read belongs to the list; if not, drops the list.
  bool IsListRead(const lazy::LazyTensor& tensor, bool holds_data);

  // While the object lives, the executor makes a graph.
  class Graph {
   public:
    Graph(const lazy::LazyGraphExecutor& executor, const std::vector<lazy::Value>& roots,
          abi::Executor::SyncTensorCollection& collection);
    void Known(abi::Executor::PostOrderData& graph) noexcept;
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

   private:
    GraphContext context_;
  };
  void PassBarrier(const lazy::LazyGraphExecutor& executor, abi::Executor::SyncTensorCollection& collection,
                   const std::function<void()>& pass);
  void Prepare(abi::Executor::Async& run, const abi::Executor::SyncTensorCollection& collection) noexcept;
  std::function<void()> Start(const lazy::MultiWait* runner, std::function<void()> run);
  void End(const lazy::BackendDevice& device);

  // Ends a step or run that was claimed on this thread and not finished, because the host threw.
  void GiveUp(const Reason& why = ReasonCode::kGivenUp) noexcept;

  // This thread's last list of live tensors; empty if it has been dropped.
  const LiveTensors& List() const { return list_; }
  // The device of this thread's last step, or the device that the program has named since.
  std::optional<lazy::BackendDevice> last_device;

 private:
  void ClaimDonors(GraphContext& context);

  StepPhase phase_ = StepPhase::kIdle;
  LiveTensors list_;
  std::shared_ptr<Claim> claim_;   // from kClaimed until Start()
  std::optional<RunContext> run_;  // made by Prepare(), taken by Start()
  // The run that could not be prepared, and the error, which Start() raises.
  const lazy::MultiWait* failed_run_ = nullptr;  // compared only, never dereferenced
  std::exception_ptr failure_;
  bool recorded_ = false;  // the registry has a step for the graph made last
};

}  // namespace torch_xla_donate
