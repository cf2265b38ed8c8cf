// Orders the parameters of graphs that are compiled for donors, and claims the donors of an announced run.
#include "features/compiled_run.h"

#include <algorithm>
#include <utility>

#include "features/reuse_warnings.h"
#include "features/switches.h"
#include "host/graphs.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "step/donor_set.h"
#include "step/parameter_order.h"
#include "step/planner.h"

namespace torch_xla_donate {

namespace {

struct AnnouncedRun {
  std::vector<Steps::Offer> offers;
  std::string graph;
  bool consumes;  // whether the graph has been compiled with these donors
};

struct NextRun {
  // The donors given to OrderParameters(), and the resulting order.
  std::optional<std::unordered_set<const lazy::BackendData*>> ordered_donors;
  std::vector<OrderedParameter> ordered;
  std::optional<AnnouncedRun> announced;
  bool expected = false;  // the registry has a step for the next run
};
thread_local NextRun next_run;

// torch_xla may have to run other pending work first. That run has other parameters.
bool IsAnnounced(const RunContext& run, const AnnouncedRun& announced) {
  const auto& parameters = run.run.parameters_data;
  return std::all_of(announced.offers.begin(), announced.offers.end(), [&parameters](const Steps::Offer& offer) {
    return !offer.parameter.has_value() ||
           (*offer.parameter < parameters.size() && parameters[*offer.parameter].get() == offer.donor->array.key);
  });
}

// The marks are armed, so no other thread can cancel or claim them. They are over if their call is.
void ClaimDonors(RunContext& run, const AnnouncedRun& announced) {
  if (!announced.consumes) {
    std::vector<Refusal> refused;
    for (const Steps::Offer& offer : announced.offers) {
      Marks::Disarm(*offer.donor);
      refused.push_back({offer.donor, DisabledReason(), /*notify=*/false});
    }
    const StepPtr step = Steps::Get().Claim({}, std::move(refused)).step;
    run.recorded = step != nullptr;
    if (ReportsReuse() && step != nullptr) {
      NoteUndonated(run, step->number, step->refused);
    }
    return;
  }
  auto claim = std::make_shared<Claim>();
  claim->CommitCompiled(run, announced.offers, announced.graph);
  run.recorded = claim->HasDonors();
  run.claim = run.recorded ? std::move(claim) : nullptr;
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
  const bool moved = PermuteParameters(pairs.parameter_order, graph, context.collection);
  next_run.ordered.resize(count);
  for (std::size_t place = 0; place < count; ++place) {
    const std::size_t old = moved ? pairs.parameter_order[place] : place;
    next_run.ordered[place] = {reinterpret_cast<std::uintptr_t>(graph.parameters_data[place].get()),
                               pairs.preferred_output[old]};
  }
}

void ClaimAnnounced(RunContext& run) {
  const bool expected = run.runs_all && std::exchange(next_run.expected, false);
  if (next_run.announced.has_value() && run.claim == nullptr && IsAnnounced(run, *next_run.announced)) {
    ClaimDonors(run, *next_run.announced);
    next_run.announced.reset();
  }
  run.recorded = run.recorded || expected;
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

bool DonateToNextRun(const CallSite* call, const std::vector<const lazy::BackendData*>& buffers,
                     std::vector<Steps::Offer> offers, std::string graph, bool consumes) {
  DisarmRun();
  std::vector<DonorPtr> donors = Marks::Get().Arm(buffers, call);
  if (donors.empty()) {
    return false;
  }
  for (std::size_t i = 0; i < donors.size(); ++i) {
    offers[i].donor = std::move(donors[i]);
    offers[i].armed = true;
  }
  next_run.announced = AnnouncedRun{std::move(offers), std::move(graph), consumes};
  return true;
}

void DisarmRun() {
  if (const auto announced = std::exchange(next_run.announced, std::nullopt)) {
    for (const Steps::Offer& offer : announced->offers) {
      Marks::Disarm(*offer.donor);
    }
  }
}

void ExpectRun() { next_run.expected = true; }

}  // namespace torch_xla_donate
