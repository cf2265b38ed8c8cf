// Orders the parameters of graphs that are compiled for donors, and claims the donors of an announced run.
#include "features/compiled_run.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "features/reuse_warnings.h"
#include "features/switches.h"
#include "host/graphs.h"
#include "step/donor_set.h"
#include "step/graph_arrays.h"
#include "step/observer.h"
#include "step/parameter_order.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

namespace {

struct AnnouncedRun {
  std::shared_ptr<const CallSite> call;
  std::vector<RunDonor> donors;
  std::string graph;
};

struct ThreadState {
  // The donors given to OrderParameters(), and the resulting order.
  std::optional<std::unordered_set<const lazy::BackendData*>> ordered_donors;
  std::vector<OrderedParameter> ordered;
  std::optional<AnnouncedRun> announced;
  bool expected = false;  // the registry has a step for the next run
};
ThreadState& State() {
  thread_local ThreadState state;
  return state;
}

class CompiledRun : public StepObserver {
  void GraphKnown(GraphContext& context) override {
    ThreadState& state = State();
    if (!state.ordered_donors.has_value()) {
      return;
    }
    abi::Executor::PostOrderData& graph = *context.graph;
    const std::size_t count = graph.parameters_data.size();
    const GraphArrays arrays =
        MeasureArrays(graph.parameters_data, context.roots, abi::IsSpmd(context.collection.device));
    std::vector<bool> donors(count);
    for (std::size_t i = 0; i < count; ++i) {
      donors[i] = state.ordered_donors->count(graph.parameters_data[i].get()) != 0;
    }
    const DonorPairs pairs = PairDonors({arrays.bytes, arrays.output_bytes,
                                         /*movable=*/std::vector<bool>(context.roots.size(), false), donors,
                                         /*offered=*/std::vector<bool>(count, false),
                                         /*wanted=*/std::vector<std::optional<std::size_t>>(count),
                                         NearParameters(graph.parameters_data, context.roots)});
    std::unordered_map<const lazy::BackendData*, std::optional<std::size_t>> successor_of;
    for (std::size_t i = 0; i < count; ++i) {
      successor_of.emplace(graph.parameters_data[i].get(), pairs.successor[i]);
    }
    PutFirst(pairs.parameter_order, graph, context.collection);
    state.ordered.clear();
    for (const lazy::BackendDataPtr& parameter : graph.parameters_data) {
      state.ordered.push_back({parameter.get(), successor_of[parameter.get()]});
    }
  }

  void BeforeRun(RunContext& run) override {
    ThreadState& state = State();
    if (state.announced.has_value() && run.claim == nullptr && IsAnnounced(run, *state.announced)) {
      Claim(run, *std::exchange(state.announced, std::nullopt));
    }
    if (run.runs_all) {
      const bool expected = std::exchange(state.expected, false);
      run.recorded = run.recorded || expected;
    }
  }

  // torch_xla may have to run other pending work first. That run has other parameters.
  static bool IsAnnounced(const RunContext& run, const AnnouncedRun& announced) {
    const auto& parameters = run.run.parameters_data;
    return std::all_of(announced.donors.begin(), announced.donors.end(), [&parameters](const RunDonor& donor) {
      return !donor.parameter.has_value() ||
             (*donor.parameter < parameters.size() && parameters[*donor.parameter] == donor.buffer);
    });
  }

  static void Claim(RunContext& run, const AnnouncedRun& announced) {
    DonationRegistry& registry = DonationRegistry::Get();
    std::vector<lazy::BackendDataPtr> buffers;
    for (const RunDonor& donor : announced.donors) {
      buffers.push_back(donor.buffer);
    }
    std::vector<DonorPtr> donors;
    for (const auto& [position, donor] : registry.PendingAmong(buffers, announced.call.get())) {
      donor->parameter = announced.donors[position].parameter;
      donor->successor = announced.donors[position].successor;
      donors.push_back(donor);
    }
    if (donors.empty()) {
      return;
    }
    run.recorded = true;
    if (DonationDisabled()) {  // the graph has been compiled without these donors
      std::vector<DonationRegistry::Refusal> refused;
      for (const DonorPtr& donor : donors) {
        refused.push_back({donor, DisabledReason(), /*notify=*/false});
      }
      const std::uint64_t step = registry.Claim({}, std::move(refused))->number;
      if (ReportsReuse()) {
        RememberWouldBeConsumed(run, step, donors);
      }
      return;
    }
    run.claim = std::make_shared<torch_xla_donate::Claim>(registry.Claim(donors, {}));
    for (const DonorPtr& donor : donors) {
      ForgetCachedValues(*donor);
    }
    run.claim->Commit(run, announced.graph);
  }
};

}  // namespace

StepObserver& CompiledRunFeature() { return TheOnly<CompiledRun>(); }

void OrderParameters(std::unordered_set<const lazy::BackendData*> donors) {
  State().ordered_donors = std::move(donors);
  State().ordered.clear();
}

std::vector<OrderedParameter> TakeOrder() {
  State().ordered_donors.reset();
  return std::exchange(State().ordered, {});
}

bool IsExtracting() { return State().ordered_donors.has_value(); }

void DonateToNextRun(std::shared_ptr<const CallSite> call, std::vector<RunDonor> donors, std::string graph) {
  ThreadStep::Get().GiveUp();
  State().announced = AnnouncedRun{std::move(call), std::move(donors), std::move(graph)};
}

void DisarmRun() {
  State().announced.reset();
  ThreadStep::Get().GiveUp();
}

void ExpectRun() { State().expected = true; }

}  // namespace torch_xla_donate
