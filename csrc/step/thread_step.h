// One thread's step, and the functions that the hooks call in its phases.
//
// A step (torch_xla.sync(), xm.mark_step()) calls the members of ThreadStep in the order in which they stand here. The
// hooks that call them are in features/intercepts.cpp, in the same order.
//
// Ownership: the thread's step owns the list. A guard in torch_xla's own objects ends a claim.
// Threads: belongs to one thread.
// Errors: an exception in a phase, or a lack of memory, is caught where torch_xla cannot handle it. Before the
//   donors are claimed, the step then runs without donation. After that, its run does not begin, and torch_xla raises
//   the error.
#pragma once

#include <c10/util/FunctionRef.h>

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
};

class ThreadStep {
 public:
  // Each live tensor passes this in each step. A variable with a constructor would be looked up twice.
  static ThreadStep& Get() { return current_ != nullptr ? *current_ : Make(); }

  // Calls the executor's function, which lists the live tensors.
  void List(void* arena, const lazy::BackendDevice* device, c10::function_ref<void()> list);
  void TensorMade(const abi::TensorData& data) {
    if (phase_ != StepPhase::kListing) {
      ProgramContinues();
    } else if (list_.IsKept()) {
      list_.Add(data.unique_id, data.handle.get());
    }
  }
  // A tensor's handle is read. Both return whether the read belongs to the list. The first knows it of nearly all that
  // do. The second, called if the first returned false, drops the list if the read does not belong to it.
  bool IsNextListRead(const lazy::LazyTensor& tensor) { return list_.IsNextRead(tensor.data()->unique_id); }
  bool IsListRead(const lazy::LazyTensor& tensor, bool holds_data);

  // Calls the executor's function, which makes a graph.
  abi::Executor::PostOrderData Order(const std::vector<lazy::Value>& roots,
                                     abi::Executor::SyncTensorCollection& collection,
                                     c10::function_ref<abi::Executor::PostOrderData()> order);
  void PassBarrier(abi::Executor::SyncTensorCollection& collection, c10::function_ref<void()> pass);
  void Prepare(abi::Executor::Async& run, const abi::Executor::SyncTensorCollection& collection) noexcept;
  std::function<void()> Start(const lazy::MultiWait* runner, std::function<void()> run);
  void End(const lazy::BackendDevice& device);

  // The device of this thread's last step, or the device that the program has named since.
  std::optional<lazy::BackendDevice> last_device;

 private:
  static ThreadStep& Make();
  // Of a step or run that has ended, or that the host has dropped.
  void Forget() noexcept;
  void ProgramContinues();
  void GraphKnown(GraphContext& context) noexcept;
  void ClaimDonors(GraphContext& context);

  static inline thread_local ThreadStep* current_ = nullptr;

  StepPhase phase_ = StepPhase::kIdle;
  void* arena_ = nullptr;          // the executor's, of the last list
  LiveTensorList list_;            // empty if it has been dropped
  std::shared_ptr<Claim> claim_;   // of the graph made last, until Prepare() gives it to the run
  std::optional<RunContext> run_;  // made by Prepare(), taken by Start()
  // Of the graph made last, which the collection identifies; it is compared only, never dereferenced.
  const abi::Executor::SyncTensorCollection* made_ = nullptr;
  bool recorded_ = false;  // the registry has a step for it
  std::optional<DryRun> dry_run_;
};

}  // namespace torch_xla_donate
