// The token that orders the collectives of a step leads to its inputs, and a collective of a later step would read them
// by way of it. torch_xla.sync() drops it when the step is over, but after the step closures, and a sync of the live
// tensors without that does not drop it. As the graph of this step is complete, the token can go before the donors are
// chosen, and before the executor has a lock, for which a thread that has the GIL may wait.
#include <utility>

#include "features/switches.h"
#include "host/graphs.h"
#include "step/callbacks.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

class Collectives : public StepObserver {
  void BeforeGraph(GraphContext& graph) override {
    if (!graph.is_step) {
      return;
    }
    Reason why = ReasonCode::kDeviceLocked;
    if (graph.collection.unlocker.empty()) {
      try {
        Callbacks().forget_collectives(abi::TorchDevice(graph.collection.device).str());
        if (Reason found = SwitchedOffReason(); !found.empty()) {
          graph.gate.Refuse(std::move(found), /*notify_user=*/false);
        }
        return;
      } catch (const std::exception& error) {
        why = {ReasonCode::kTokenKept, error.what()};
      }
    }
    graph.gate.Refuse(std::move(why), /*notify_user=*/true);
  }
};

}  // namespace

StepObserver& CollectivesFeature() { return TheOnly<Collectives>(); }

}  // namespace torch_xla_donate
