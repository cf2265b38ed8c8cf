// Orders the parameters of graphs that are compiled for donors, and claims the donors of an announced run.
#include "features/compiled_run.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "features/reuse_warnings.h"
#include "features/switches.h"
#include "host/graphs.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "step/donor_set.h"
#include "step/parameter_order.h"
#include "step/planner.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

namespace {

struct AnnouncedRun {
  std::shared_ptr<const CallSite> call;
  std::vector<RunDonor> donors;
  std::string graph;
};

struct NextRun {
  // The donors given to OrderParameters(), and the resulting order.
  std::optional<std::unordered_set<const lazy::BackendData*>> ordered_donors;
  std::vector<OrderedParameter> ordered;
  std::optional<AnnouncedRun> announced;
  bool expected = false;  // the registry has a step for the next run
};
thread_local NextRun next_run;

std::vector<lazy::BackendDataPtr> BuffersOf(const std::vector<RunDonor>& donors) {
  std::vector<lazy::BackendDataPtr> buffers;
  buffers.reserve(donors.size());
  for (const RunDonor& donor : donors) {
    buffers.push_back(donor.buffer);
  }
  return buffers;
}

// torch_xla may have to run other pending work first. That run has other parameters.
bool IsAnnounced(const RunContext& run, const AnnouncedRun& announced) {
  const auto& parameters = run.run.parameters_data;
  return std::all_of(announced.donors.begin(), announced.donors.end(), [&parameters](const RunDonor& donor) {
    return !donor.parameter.has_value() ||
           (*donor.parameter < parameters.size() && parameters[*donor.parameter] == donor.buffer);
  });
}

// The marks are armed, so no other thread can cancel or claim them.
void ClaimDonors(RunContext& run, const AnnouncedRun& announced) {
  const std::vector<lazy::BackendDataPtr> buffers = BuffersOf(announced.donors);
  std::vector<DonorPtr> marked = Marks::Get().DonorsOf(buffers, announced.call.get());
  std::vector<Steps::Offer> offers;
  offers.reserve(marked.size());
  for (std::size_t i = 0; i < marked.size(); ++i) {
    if (marked[i] != nullptr) {
      const RunDonor& donor = announced.donors[i];
      offers.push_back({std::move(marked[i]), donor.parameter, donor.preferred_output, std::nullopt, /*armed=*/true});
    }
  }
  if (offers.empty()) {
    return;
  }
  run.recorded = true;
  if (DonationDisabled()) {  // the graph has been compiled without these donors
    std::vector<Refusal> refused;
    std::vector<DonorPtr> donors;
    for (const Steps::Offer& offer : offers) {
      refused.push_back({offer.donor, DisabledReason(), /*notify=*/false});
      donors.push_back(offer.donor);
    }
    Marks::Get().Disarm(buffers);
    const StepPtr step = Steps::Get().Claim({}, std::move(refused)).step;
    if (ReportsReuse() && step != nullptr) {
      NoteUndonated(run, step->number, donors);
    }
    return;
  }
  auto claim = std::make_shared<Claim>();
  claim->CommitCompiled(run, offers, announced.graph);
  run.claim = std::move(claim);
}

}  // namespace

void OrderForDonors(GraphContext& context) {
  if (!next_run.ordered_donors.has_value()) {
    return;
  }
  abi::Executor::PostOrderData& graph = *context.graph;
  const std::size_t count = graph.parameters_data.size();
  const lazy::BackendDevice& device = context.collection.device;
  StepFacts facts{
      graph, context.roots, device, context.collection.hash, abi::IsSpmd(device), false, std::vector<PlanInput>(count)};
  for (std::size_t i = 0; i < count; ++i) {
    facts.inputs[i].is_marked = next_run.ordered_donors->count(graph.parameters_data[i].get()) != 0;
    facts.inputs[i].is_barred = !facts.inputs[i].is_marked;
  }
  GraphArrays arrays = facts.Measure();
  arrays.movable.assign(context.roots.size(), false);
  const DonorPairs pairs = facts.PlanFor(arrays).pairs;
  std::unordered_map<const lazy::BackendData*, std::optional<std::size_t>> output_of;
  for (std::size_t i = 0; i < count; ++i) {
    output_of.emplace(graph.parameters_data[i].get(), pairs.preferred_output[i]);
  }
  PermuteParameters(pairs.parameter_order, graph, context.collection);
  next_run.ordered.clear();
  for (const lazy::BackendDataPtr& parameter : graph.parameters_data) {
    next_run.ordered.push_back({parameter.get(), output_of[parameter.get()]});
  }
}

void ClaimAnnounced(RunContext& run) {
  if (next_run.announced.has_value() && run.claim == nullptr && IsAnnounced(run, *next_run.announced)) {
    try {
      ClaimDonors(run, *next_run.announced);
      next_run.announced.reset();
    } catch (const std::exception&) {
      // The graph would consume the donors although no step has claimed them.
      run.failure = std::current_exception();
    }
  }
  if (run.runs_all) {
    const bool expected = std::exchange(next_run.expected, false);
    run.recorded = run.recorded || expected;
  }
}

void OrderParameters(std::unordered_set<const lazy::BackendData*> donors) {
  next_run.ordered_donors = std::move(donors);
  next_run.ordered.clear();
}

std::vector<OrderedParameter> TakeOrder() {
  next_run.ordered_donors.reset();
  return std::exchange(next_run.ordered, {});
}

bool IsExtracting() { return next_run.ordered_donors.has_value(); }

bool DonateToNextRun(std::shared_ptr<const CallSite> call, std::vector<RunDonor> donors, std::string graph) {
  ThreadStep::Get().GiveUp();
  AnnouncedRun run{std::move(call), std::move(donors), std::move(graph)};
  if (!Marks::Get().Arm(BuffersOf(run.donors), run.call.get())) {
    return false;
  }
  next_run.announced = std::move(run);
  return true;
}

void DisarmRun() {
  if (const auto announced = std::exchange(next_run.announced, std::nullopt)) {
    Marks::Get().Disarm(BuffersOf(announced->donors));
  }
  ThreadStep::Get().GiveUp();
}

void ExpectRun() { next_run.expected = true; }

}  // namespace torch_xla_donate
