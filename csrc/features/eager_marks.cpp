// An operation in eager mode is a graph of its own that runs at once. It donates nothing, and the marks that it has
// read must not wait for whatever step comes upon these buffers later.
#include "features/switches.h"
#include "host/graphs.h"
#include "registry/registry.h"
#include "step/observer.h"
#include "step/watch.h"

namespace torch_xla_donate {

namespace {

class EagerMarks : public StepObserver {
  void GraphKnown(GraphContext& context) override {
    const auto& config = context.collection.config;
    if (!Watches(kRegistry) || !config.force_ltc_data || config.sync_ltc_data || !abi::InEagerMode(context.executor)) {
      return;
    }
    std::vector<DonationRegistry::Refusal> refused;
    for (const auto& [position, donor] : DonationRegistry::Get().PendingAmong(context.graph->parameters_data)) {
      const bool off = DonationDisabled();
      refused.push_back({donor, off ? DisabledReason() : ReasonCode::kReadEagerly, /*notify=*/!off});
    }
    if (!refused.empty()) {
      DonationRegistry::Get().Claim({}, std::move(refused));
    }
  }
};

}  // namespace

StepObserver& EagerMarksFeature() { return TheOnly<EagerMarks>(); }

}  // namespace torch_xla_donate
