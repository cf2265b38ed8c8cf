// Fetches the noted outputs one by one and counts NaNs and infinities.
#include "features/output_check.h"

#include <ATen/ATen.h>
#include <torch/csrc/lazy/backend/backend_interface.h>

#include <future>
#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>

#include "features/reuse_warnings.h"
#include "features/switches.h"
#include "host/array_text.h"
#include "host/graphs.h"

namespace torch_xla_donate {

namespace {

struct Output {
  std::size_t index;
  std::string array;
  at::ScalarType dtype;
  lazy::BackendDataPtr buffer;
  at::Tensor copy;  // defined once it has been fetched
  std::weak_ptr<const lazy::BackendData> given;
};
struct Run {
  bool compiled = false;
  std::size_t outputs = 0;
  std::vector<Output> floating;
  std::shared_future<void> ended;
};

thread_local std::vector<Run> noted_runs;

void Fetch(Output& output) {
  // The device does not allow reads of a buffer without a value.
  if (output.buffer != nullptr && output.buffer->HasValue()) {
    output.copy = lazy::getBackend()->MakeTensorFromComputationData(output.buffer, output.dtype);
  }
  output.buffer = nullptr;
}

// The earlier runs have ended. torch_xla donates inputs updated in place, so these outputs may be gone later.
void FetchWhatIsRead(const std::vector<lazy::BackendDataPtr>& parameters) {
  if (noted_runs.empty()) {
    return;
  }
  const std::unordered_set<lazy::BackendDataPtr> read(parameters.begin(), parameters.end());
  for (Run& run : noted_runs) {
    for (Output& output : run.floating) {
      if (read.count(output.buffer) != 0) {
        Fetch(output);
      }
    }
  }
}

}  // namespace

void NoteOutputs(RunContext& context) {
  if (!context.runs_all || !ChecksOutputs()) {
    return;
  }
  abi::Executor::Async& run = context.run;
  FetchWhatIsRead(run.parameters_data);
  Run noted;
  noted.compiled = run.indices.empty();  // a compiled graph belongs to no collection of tensors
  noted.outputs = run.tensors_data.size();
  for (std::size_t i = 0; i < run.tensors_data.size(); ++i) {
    const lazy::BackendDataPtr& buffer = run.tensors_data[i];
    if (buffer == nullptr) {
      continue;
    }
    const std::string array = abi::DescribeBuffer(*buffer);
    const std::optional<at::ScalarType> dtype = ElementType(array);
    if (dtype && (c10::isFloatingType(*dtype) || c10::isComplexType(*dtype))) {
      noted.floating.push_back({i, WithoutLayout(array), *dtype, buffer, {}, buffer});
    }
  }
  const auto ended = std::make_shared<std::promise<void>>();
  noted.ended = ended->get_future().share();
  context.OnEnd([ended](const Reason&) { ended->set_value(); });
  noted_runs.push_back(std::move(noted));
}

bool HasNotedOutputs() { return !noted_runs.empty(); }

void DropNotedOutputs() { noted_runs.clear(); }

std::vector<BadOutput> TakeBadOutputs() {
  const bool infs = ChecksInfinities();
  std::vector<Run> runs = std::exchange(noted_runs, {});
  std::vector<BadOutput> bad;
  for (Run& run : runs) {
    run.ended.wait();
    for (Output& output : run.floating) {
      if (!output.copy.defined()) {
        Fetch(output);
      }
      if (!output.copy.defined()) {
        continue;
      }
      at::Tensor values = std::exchange(output.copy, {});
      if (c10::isFloat8Type(output.dtype)) {
        values = values.to(at::kFloat);
      }
      BadOutput found{run.compiled, output.index, run.outputs, output.array, values.numel()};
      found.nans = at::isnan(values).sum().item<std::int64_t>();
      found.infs = infs ? at::isinf(values).sum().item<std::int64_t>() : 0;
      found.buffer = output.given;
      if (found.nans + found.infs > 0) {
        bad.push_back(std::move(found));
      }
    }
  }
  if (!bad.empty()) {
    AllowReuseOfLastStep();
  }
  return bad;
}

}  // namespace torch_xla_donate
