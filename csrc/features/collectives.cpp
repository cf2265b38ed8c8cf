// The token that orders the collectives of a step leads to its inputs, and a collective of a later step would read them
// by way of it. torch_xla.sync() drops it when the step is over, but after the step closures, and a sync of the live
// tensors without that does not drop it. As the graph of this step is complete, the token can go before the donors are
// chosen, and before the executor has a lock, for which a thread that has the GIL may wait.
#include "step/callbacks.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

class Collectives : public StepObserver {
  void BeforeGraph(GraphContext& graph) override {
    if (!graph.is_step) {
      return;
    }
    std::string why = "torch_xla has locked the device already";
    if (graph.collection.unlocker.empty()) {
      try {
        Callbacks().forget_collectives(abi::TorchDevice(graph.collection.device).str());
        return;
      } catch (const std::exception& error) {
        why = error.what();
      }
    }
    graph.gate.Refuse(
        "the token that orders collectives, which may read inputs of the step, could not be dropped: " + why,
        /*notify_user=*/true);
  }
};

}  // namespace

StepObserver& CollectivesFeature() { return TheOnly<Collectives>(); }

}  // namespace torch_xla_donate
