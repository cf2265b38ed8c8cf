// In eager mode each operation is a separate graph that runs at once and donates nothing. The marks that it has read
// end here, so that no later step consumes these buffers.
#include "features/switches.h"
#include "host/graphs.h"
#include "registry/registry.h"
#include "registry/watch.h"
#include "step/observer.h"

namespace torch_xla_donate {

namespace {

class EagerMarks : public StepObserver {
  void GraphKnown(GraphContext& context) override {
    const auto& config = context.collection.config;
    if (!Watches(kRegistry) || !config.force_ltc_data || config.sync_ltc_data || !abi::InEagerMode(context.executor)) {
      return;
    }
    std::vector<DonationRegistry::Refusal> refused;
    for (const auto& mark : DonationRegistry::Get().PendingAmong(context.graph->parameters_data)) {
      const bool off = DonationDisabled();
      refused.push_back({mark.donor, off ? DisabledReason() : ReasonCode::kReadEagerly, /*notify=*/!off});
    }
    if (!refused.empty()) {
      DonationRegistry::Get().Claim({}, std::move(refused));
    }
  }
};

}  // namespace

StepObserver& EagerMarksFeature() { return TheOnly<EagerMarks>(); }

}  // namespace torch_xla_donate
