// The table of a step's phases: which function of which feature runs in each, in this order.
#include "step/phases.h"

#include "features/auto_donors.h"
#include "features/compiled_run.h"
#include "features/executables.h"
#include "features/outdated_tensors.h"
#include "features/output_check.h"
#include "features/reuse_warnings.h"
#include "features/run_guard.h"
#include "features/switches.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "registry/tallies.h"
#include "registry/watch.h"
#include "step/callbacks.h"
#include "step/donor_set.h"

namespace torch_xla_donate {

namespace {

// An exception must not reach torch_xla, which would lose the pending values of the step.
template <typename Context>
void Guarded(void (*function)(Context&), Context& context) noexcept {
  try {
    function(context);
  } catch (const std::exception& error) {
    Tallies::Get().NoteError(error.what());
  }
}

// In eager mode each operation is a separate graph that runs at once and donates nothing. The marks that it has read
// end here, so that no later step consumes these buffers.
void EndEagerMarks(GraphContext& context) {
  if (context.is_eager) {
    const bool off = DonationDisabled();
    RefuseMarks(*context.graph, off ? DisabledReason() : ReasonCode::kReadEagerly, /*notify=*/!off);
  }
}

}  // namespace

bool phases::ListBegins(const lazy::BackendDevice* device) {
  NoteStack();  // before the list, which a finalizer that it runs would end
  if (AutoDonates() || (Watches(kMarks) && Marks::Get().HasPending(device))) {
    OutdatedTensors::Get().BringUpToDate(device);  // before the list, which must not have old values
  }
  const bool has_placeholders = HasPlaceholders();
  EndReuse();
  if (Watches(kRegistry)) {
    Steps::Get().Sweep();
  }
  const bool has_marks = Watches(kRegistry);
  const bool is_automatic = ListForAutoDonors();
  Reach("ListBegins");
  return has_placeholders || has_marks || is_automatic;
}

void phases::TensorMade() {
  if (Watches(kUndonated)) {
    ForgetReused();  // the operation that used them has its result
  }
  Reach("TensorMade");
}

void phases::BeforeGraph(GraphContext& graph) {
  if (graph.follows_list && graph.runs_all) {
    DonorPlanner::Get().BeginStep(graph.collection.device);
  }
  try {
    const auto& config = graph.collection.config;
    graph.is_eager = Watches(kRegistry) && config.force_ltc_data && !config.sync_ltc_data && callbacks::InEagerMode();
    CloseGate(graph);
    Reach("BeforeGraph");
  } catch (const std::exception& error) {
    Tallies::Get().NoteError(error.what());
    graph.gate.Refuse(ReasonCode::kGivenUp, /*notify_user=*/true);
  }
}

void phases::GraphKnown(GraphContext& graph) noexcept {
  Guarded(&EndEagerMarks, graph);
  Guarded(&OrderForDonors, graph);
  Guarded(+[](GraphContext&) { Reach("GraphKnown"); }, graph);
}

void phases::ProposeDonors(DonorSet& donors) {
  ProposeAutoDonors(donors);
  Reach("ProposeDonors");
}

void phases::AtBarrier(bool may_run_python) {
  GuardBarrier();
  if (may_run_python) {
    NoteStack();
  }
  Reach("AtBarrier");
}

void phases::CheckRun(const std::vector<lazy::BackendDataPtr>& parameters) {
  GuardRun(parameters);
  Reach("CheckRun");
}

void phases::BeforeRun(RunContext& run) {
  run.stopped = IsInspected();  // before all that count or claim the run
  if (run.stopped) {
    return;
  }
  Guarded(&NoteDryRun, run);
  Guarded(&NoteOutputs, run);
  ClaimAnnounced(run);  // or the graph would consume donors that no step has claimed
#ifdef TORCH_XLA_DONATE_FAULTS
  Guarded(+[](RunContext& faulty) { faulty.OnEnd([](const Reason&) { Reach("OnEnd"); }); }, run);
#endif
  Guarded(+[](RunContext&) { Reach("BeforeRun"); }, run);
}

void phases::AtStart(RunContext& run) {
  NoteExecutable(run);  // after the claim, which it describes
  Reach("AtStart");
}

bool phases::AfterStep() {
  RecordRuns();
  Reach("AfterStep");
  return HasNotedOutputs() || Steps::Get().HasNotices() || Watches(kInputs);
}

}  // namespace torch_xla_donate
