// Proposes marked parameters, the first donors of a step.
#include "registry/registry.h"
#include "step/donor_set.h"
#include "step/observer.h"
#include "step/watch.h"

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
    const std::vector<lazy::BackendDataPtr>& parameters = step.Context().graph->parameters_data;
    for (auto& [position, donor] : DonationRegistry::Get().PendingAmong(parameters)) {
      step.Ask(parameters[position], donor);
    }
  }
  bool AfterStep(const lazy::BackendDevice&) override { return DonationRegistry::Get().HasNotices(); }
};

}  // namespace

StepObserver& MarksFeature() { return TheOnly<Marks>(); }

}  // namespace torch_xla_donate
