// The features, in the order in which they observe a step. A feature is one file and one line here.
#include "step/observer.h"

#ifdef TORCH_XLA_DONATE_FAULTS
#define TORCH_XLA_DONATE_TEST_FEATURES(ADD) ADD(FaultsFeature) /* test/faults */
#else
#define TORCH_XLA_DONATE_TEST_FEATURES(ADD)
#endif

#define TORCH_XLA_DONATE_FEATURES(FEATURE)                                              \
  FEATURE(OutdatedTensorsFeature) /* before the list, which must not have old values */ \
  FEATURE(RunProbeFeature)        /* before features that count or claim the run */     \
  FEATURE(RunGuardFeature)                                                              \
  FEATURE(PlaceholderFeature)                                                           \
  FEATURE(SwitchesFeature) /* closes the gate first, so its reason is reported */       \
  FEATURE(CollectivesFeature)                                                           \
  FEATURE(ReuseWarningsFeature)                                                         \
  FEATURE(BackwardThreadsFeature)                                                       \
  FEATURE(OutputCheckFeature)                                                           \
  FEATURE(MarksFeature)                                                                 \
  FEATURE(AutoDonorsFeature) /* marks come first */                                     \
  FEATURE(EagerMarksFeature)                                                            \
  FEATURE(CompiledRunFeature)                                                           \
  FEATURE(DonatedCopiesFeature)                                                         \
  FEATURE(RunLogFeature) /* after the features that claim donors */                     \
  TORCH_XLA_DONATE_TEST_FEATURES(FEATURE)

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
