// Proposes marked parameters, the first donors of a step.
#include "registry/registry.h"
#include "registry/watch.h"
#include "step/donor_set.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

class Marks : public StepObserver {
  bool NeedsLiveTensors(void*, const lazy::BackendDevice*) override {
    if (Watches(kRegistry)) {
      DonationRegistry::Get().Sweep();
    }
    return Watches(kRegistry);
  }
  void ProposeDonors(DonorSet& step) override {
    for (auto& mark : DonationRegistry::Get().PendingAmong(step.Context().graph->parameters_data)) {
      step.Propose(std::move(mark));
    }
  }
  bool AfterStep(const lazy::BackendDevice&) override { return DonationRegistry::Get().HasNotices(); }
};

}  // namespace

StepObserver& MarksFeature() { return TheOnly<Marks>(); }

}  // namespace torch_xla_donate
