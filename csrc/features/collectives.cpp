// Drops the token that orders a step's collectives before the step's donors are chosen.
//
// The token depends on the inputs of the step, so a collective of a later step would read them through it.
// torch_xla.sync() drops the token after the step closures; a plain sync of the live tensors keeps it. Here the graph
// of the step is complete, so the token is not needed. The executor does not hold a lock yet that a thread with the GIL
// could wait for.
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
