// The warnings that follow from a dry run.
#include "features/reuse_warnings.h"

#include <c10/util/ScopeExit.h>

#include <optional>
#include <utility>
#include <vector>

#include "host/array_text.h"
#include "host/graphs.h"
#include "registry/steps.h"
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

struct Reuse {
  std::uint64_t last_step = 0;  // the last step, if it would have consumed a buffer
  std::vector<Reused> reused;
  bool reporting = false;  // inside the callback, which may use tensors
};
thread_local Reuse reuse;

// The donors that XLA would have used for these outputs.
std::vector<DonorPtr> UsedFor(const std::vector<lazy::BackendDataPtr>& outputs, const DryRun& dry_run) {
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
  for (const auto& [size, donor] : dry_run.parameters) {
    if (free.Take(size) && donor != nullptr) {
      used.push_back(donor);
    }
  }
  return used;
}

void Remember(RunContext& run, const DryRun& dry_run) {
  const std::vector<DonorPtr> donors = UsedFor(run.run.tensors_data, dry_run);
  ForgetCachedValues(Steps::Get().NoteUndonated(donors, dry_run.step));
  reuse.last_step = dry_run.step;
  run.OnEnd([step = dry_run.step](const Reason& failure) {
    if (!failure.empty()) {
      Steps::Get().ForgetUndonated(step);  // a step that fails consumes nothing
    }
  });
}

}  // namespace

bool ReportReuse(const lazy::BackendData* buffer) {
  if (!Watches(kUndonated) || reuse.reporting) {
    return false;
  }
  const auto found = Steps::Get().FindUndonated(buffer);
  if (!found.has_value()) {
    return false;
  }
  reuse.reporting = true;
  const auto leave = c10::make_scope_exit([] { reuse.reporting = false; });
  callbacks::ReportReuse(found->donor, found->step);
  return true;
}

void ReportReuse(const std::shared_ptr<abi::TensorData>& tensor, const lazy::BackendData* buffer) {
  if (ReportReuse(buffer)) {
    reuse.reused.push_back({tensor, buffer});
  }
}

void NoteUndonated(RunContext& run, std::uint64_t step, const std::vector<DonorPtr>& donors) {
  DryRun dry_run{step, {}};
  for (const DonorPtr& donor : donors) {
    if (const lazy::BackendDataPtr buffer = donor->buffer.lock()) {
      dry_run.parameters.emplace_back(SizeOf(abi::DescribeBuffer(*buffer), /*unsharded=*/false), donor);
    }
  }
  Remember(run, dry_run);
}

void AllowReuseOfLastStep() { Steps::Get().ForgetUndonated(reuse.last_step); }

void EndReuse() {
  ForgetReused();
  reuse.last_step = 0;
}

void ForgetReused() {
  for (const Reused& reused : reuse.reused) {
    const std::shared_ptr<abi::TensorData> tensor = reused.tensor.lock();
    if (tensor != nullptr && tensor->handle.get() == reused.buffer) {
      tensor->ir_value = lazy::Value();
    }
  }
  reuse.reused.clear();
}

void NoteDryRun(RunContext& run) {
  if (run.dry_run.has_value()) {
    Remember(run, *run.dry_run);
  }
}

}  // namespace torch_xla_donate
