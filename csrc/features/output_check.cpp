// Fetches noted outputs one by one and counts what is not finite.
#include "features/output_check.h"

#include <ATen/ATen.h>
#include <torch/csrc/lazy/backend/backend_interface.h>

#include <unordered_set>
#include <utility>

#include "host/array_text.h"

namespace torch_xla_donate {

OutputCheck& OutputCheck::OfThisThread() {
  thread_local OutputCheck check;
  return check;
}

void OutputCheck::Drop() {
  runs_.clear();
  runner_ = nullptr;
  end_ = nullptr;
}

void OutputCheck::Fetch(Output& output) {
  // The device lets nobody read a buffer that is not there.
  if (output.buffer != nullptr && output.buffer->HasValue()) {
    output.copy = lazy::getBackend()->MakeTensorFromComputationData(output.buffer, output.dtype);
  }
  output.buffer = nullptr;
}

// The executor has waited for the earlier runs by now. torch_xla donates what is updated in place, so this is the last
// moment at which their outputs are there for certain.
void OutputCheck::FetchWhatIsRead(const std::vector<lazy::BackendDataPtr>& parameters) {
  if (runs_.empty()) {
    return;
  }
  const std::unordered_set<lazy::BackendDataPtr> read(parameters.begin(), parameters.end());
  for (Run& run : runs_) {
    for (Output& output : run.floating) {
      if (read.count(output.buffer) != 0) {
        Fetch(output);
      }
    }
  }
}

void OutputCheck::Note(abi::Executor::Async& run) {
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
      noted.floating.push_back({i, WithoutLayout(array), *dtype, buffer, {}});
    }
  }
  end_ = std::make_shared<std::promise<void>>();
  runner_ = &run.mwait;
  noted.ended = end_->get_future().share();
  runs_.push_back(std::move(noted));
}

std::function<void()> OutputCheck::Watch(const lazy::MultiWait* runner, std::function<void()> run) {
  if (end_ == nullptr || runner != runner_) {
    return run;
  }
  return [run = std::move(run), end = std::exchange(end_, nullptr)] {
    try {
      run();
    } catch (...) {
      end->set_value();
      throw;
    }
    end->set_value();
  };
}

std::vector<BadOutput> OutputCheck::Check(bool infs) {
  std::vector<Run> runs = std::exchange(runs_, {});
  Drop();  // a promise that was never handed on would be waited for in vain
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
      if (found.nans + found.infs > 0) {
        bad.push_back(std::move(found));
      }
    }
  }
  return bad;
}

}  // namespace torch_xla_donate
