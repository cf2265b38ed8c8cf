// The forecast of a dry run, and the warnings that follow from it.
#include "features/reuse_warnings.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "host/array_text.h"
#include "host/graphs.h"
#include "registry/watch.h"
#include "step/callbacks.h"
#include "step/donor_set.h"
#include "step/graph_arrays.h"

namespace torch_xla_donate {

namespace {

// An operation has used this buffer. Through the tensor's cached node, the next operation would not be noticed.
struct Reused {
  std::weak_ptr<abi::TensorData> tensor;
  const lazy::BackendData* buffer;
};

// The result of a dry run. Holds no buffer, so that a step that fails to compile keeps nothing alive.
struct Forecast {
  const abi::Executor::SyncTensorCollection* collection;  // compared only, never dereferenced
  std::uint64_t step;
  std::vector<std::pair<ArraySize, DonorPtr>> parameters;  // in the order of the graph

  void Add(const lazy::BackendData& buffer, DonorPtr donor) {
    parameters.emplace_back(SizeOf(abi::DescribeBuffer(buffer), /*unsharded=*/false), std::move(donor));
  }
};

struct ThreadState {
  std::optional<Forecast> forecast;  // until its step runs
  std::uint64_t last_step = 0;       // the last step, if it would have consumed a buffer
  std::vector<Reused> reused;
  bool reporting = false;  // inside the callback, which may use tensors
};
ThreadState& State() {
  thread_local ThreadState state;
  return state;
}

void ForgetReused() {
  for (const Reused& reused : State().reused) {
    const std::shared_ptr<abi::TensorData> tensor = reused.tensor.lock();
    if (tensor != nullptr && tensor->handle.get() == reused.buffer) {
      tensor->ir_value = lazy::Value();
    }
  }
  State().reused.clear();
}

// The donors that XLA would have used for these outputs.
std::vector<DonorPtr> UsedFor(const std::vector<lazy::BackendDataPtr>& outputs, const Forecast& forecast) {
  std::vector<ArraySize> sizes;
  for (const lazy::BackendDataPtr& output : outputs) {
    const std::string array = output != nullptr ? abi::DescribeBuffer(*output) : std::string();
    if (IsDynamic(array)) {
      return {};  // only the device knows the size, so XLA aliases nothing
    }
    sizes.push_back(SizeOf(array, /*unsharded=*/false));
  }
  FreeOutputs free(sizes);
  std::vector<DonorPtr> used;
  for (const auto& [size, donor] : forecast.parameters) {
    if (free.Take(size) && donor != nullptr) {
      used.push_back(donor);
    }
  }
  return used;
}

void Remember(RunContext& run, const Forecast& forecast) {
  const std::vector<DonorPtr> donors = UsedFor(run.run.tensors_data, forecast);
  DonationRegistry::Get().NoteUndonated(donors, forecast.step);
  ForgetCachedValues(DonationRegistry::Get().TensorsOf(donors));
  State().last_step = forecast.step;
  run.OnEnd([step = forecast.step](const Reason& failure) {
    if (!failure.empty()) {
      DonationRegistry::Get().ForgetUndonated(step);  // a step that fails consumes nothing
    }
  });
}

class ReuseWarnings : public StepObserver {
  bool NeedsLiveTensors(void*, const lazy::BackendDevice*) override {
    ForgetReused();
    State().last_step = 0;
    return false;
  }
  bool SeesTensors() const override { return true; }
  void TensorMade() override { ForgetReused(); }  // the operation that used them has its result
  void BeforeGraph(GraphContext&) override { State().forecast.reset(); }
  void DryRunEnded(const DryRun& dry_run) override {
    State().forecast = Forecast{dry_run.collection, dry_run.step, {}};
    for (const auto& [buffer, donor] : dry_run.parameters) {
      State().forecast->Add(*buffer, donor);
    }
  }
  void BeforeRun(RunContext& run) override {
    const std::optional<Forecast> forecast = std::exchange(State().forecast, std::nullopt);
    if (forecast.has_value() && forecast->collection == run.collection) {
      Remember(run, *forecast);
    }
  }
};

}  // namespace

StepObserver& ReuseWarningsFeature() { return TheOnly<ReuseWarnings>(); }

bool ReportReuse(const lazy::BackendData* buffer) {
  ThreadState& state = State();
  if (!Watches(kUndonated) || state.reporting || !Callbacks().report_reuse) {
    return false;
  }
  const auto found = DonationRegistry::Get().FindUndonated(buffer);
  if (!found.has_value()) {
    return false;
  }
  state.reporting = true;
  const auto leave = c10::make_scope_exit([&state] { state.reporting = false; });
  Callbacks().report_reuse(found->donor, found->step);
  return true;
}

void ReportReuse(const std::shared_ptr<abi::TensorData>& tensor, const lazy::BackendData* buffer) {
  if (ReportReuse(buffer)) {
    State().reused.push_back({tensor, buffer});
  }
}

void NoteUndonated(RunContext& run, std::uint64_t step, const std::vector<DonorPtr>& donors) {
  Forecast forecast{nullptr, step, {}};
  for (const DonorPtr& donor : donors) {
    if (const lazy::BackendDataPtr buffer = donor->buffer.lock()) {
      forecast.Add(*buffer, donor);
    }
  }
  Remember(run, forecast);
}

void AllowReuseOfLastStep() { DonationRegistry::Get().ForgetUndonated(State().last_step); }

}  // namespace torch_xla_donate
