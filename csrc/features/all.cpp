// The features, in the order in which they see a step. A feature is one file and one line here.
#include "step/observer.h"

#define TORCH_XLA_DONATE_FEATURES(FEATURE)                                                     \
  FEATURE(OutdatedTensorsFeature) /* before the list: old values must not be listed */         \
  FEATURE(RunProbeFeature)        /* before whatever would count or claim the run */           \
  FEATURE(RunGuardFeature)                                                                     \
  FEATURE(SwitchesFeature) /* closes the gate first, so that its reason is the one reported */ \
  FEATURE(CollectivesFeature)                                                                  \
  FEATURE(ReuseWarningsFeature)                                                                \
  FEATURE(BackwardThreadsFeature)                                                              \
  FEATURE(OutputCheckFeature)                                                                  \
  FEATURE(MarksFeature)                                                                        \
  FEATURE(AutoDonorsFeature) /* after the marks, which come first */                           \
  FEATURE(EagerMarksFeature)                                                                   \
  FEATURE(CompiledRunFeature)                                                                  \
  FEATURE(DonatedCopiesFeature)

namespace torch_xla_donate {

#define DECLARE(feature) StepObserver& feature();
TORCH_XLA_DONATE_FEATURES(DECLARE)
#undef DECLARE

const std::vector<StepObserver*>& Observers() {
#define ADDRESS(feature) &feature(),
  static const auto* observers = new std::vector<StepObserver*>{TORCH_XLA_DONATE_FEATURES(ADDRESS)};
#undef ADDRESS
  return *observers;
}

}  // namespace torch_xla_donate
