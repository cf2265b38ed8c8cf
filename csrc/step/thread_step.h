// One thread's way through a step, and what the hooks call at each of its stations.
//
// A step (torch_xla.sync(), xm.mark_step()) passes the hooks in this order:
//   ForAllDeviceContexts     the executor lists the live tensors
//   LazyTensor::LazyTensor   ... as fresh objects, which are noted
//   CurrentDataHandle        asked of every live tensor; outside a step, each read of a tensor comes through here
//   RunPostOrder             the graph and its parameters are known: donors are chosen and put into the donor set
//   TensorCollectionBarrier  compiled, about to be scheduled: the rewritten infos are given back
//   Async::Async             the commit point: this graph will run with these parameters
//   MultiWait::Completer     gives the function that runs the graph: the outcome of the donors is read at its end
//   MarkStep                 the step is over: unusable donations are reported
//
// Ownership: the thread's step owns the list, and the claim until the run begins; the run owns it from there on.
// Threads: belongs to one thread.
// Errors: what an observer throws where torch_xla cannot bear it is caught, and the step runs without donation.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "step/donor_set.h"
#include "step/observer.h"

namespace torch_xla_donate {

enum class StepPhase {
  kIdle,
  kListing,   // inside ForAllDeviceContexts
  kListed,    // no graph has been made of the list yet
  kOrdering,  // inside RunPostOrder, which passes the barrier itself to wait for parameters
  kClaimed,   // donors are chosen, the graph is being compiled
  kCompiled,  // the executor has passed the barrier
  kPrepared,  // Async::Async has passed: it will run
};

class ThreadStep {
 public:
  static ThreadStep& Get();

  // For as long as it lives, the executor lists the live tensors.
  class Listing {
   public:
    Listing(void* arena, const lazy::BackendDevice* device);
    ~Listing();
    Listing(const Listing&) = delete;
    Listing& operator=(const Listing&) = delete;
  };
  void TensorMade(const std::shared_ptr<abi::TensorData>& data);
  // A tensor has been asked for what it holds. Whether that belongs to the list; if not, the list is of no use any
  // more.
  bool IsAskedForList(const lazy::LazyTensor& tensor, bool holds_data);

  // For as long as it lives, the executor makes a graph.
  class Graph {
   public:
    Graph(const lazy::LazyGraphExecutor& executor, const std::vector<lazy::Value>& roots,
          abi::Executor::SyncTensorCollection& collection);
    void Known(abi::Executor::PostOrderData& graph);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

   private:
    GraphContext context_;
  };
  void PassBarrier(const lazy::LazyGraphExecutor& executor, abi::Executor::SyncTensorCollection& collection,
                   const std::function<void()>& pass);
  void Prepare(abi::Executor::Async& run, const abi::Executor::SyncTensorCollection& collection);
  std::function<void()> Start(const lazy::MultiWait* runner, std::function<void()> run);
  void End(const lazy::BackendDevice& device);

  // A step or run that was claimed on this thread and never reached its end, because the host threw in between.
  void GiveUp(const Reason& why = ReasonCode::kGivenUp);

  const LiveTensors& List() const { return list_; }
  // The device that this thread has stepped last, or that the program has named since.
  std::optional<lazy::BackendDevice> last_device;

 private:
  void ClaimDonors(GraphContext& context);

  StepPhase phase_ = StepPhase::kIdle;
  LiveTensors list_;
  std::shared_ptr<Claim> claim_;     // from kClaimed to kCompiled
  std::unique_ptr<RunContext> run_;  // made by Prepare(), taken by Start()
  bool recorded_ = false;            // the registry has a step for the graph made last
};

inline void NoteDevice(const lazy::BackendDevice& device) { ThreadStep::Get().last_device = device; }
inline std::optional<lazy::BackendDevice> LastDevice() { return ThreadStep::Get().last_device; }
// The data of this thread's last list of live tensors, as long as nothing has happened since.
inline std::vector<std::shared_ptr<abi::TensorData>> ListedTensors() { return ThreadStep::Get().List().Tensors(); }

}  // namespace torch_xla_donate
