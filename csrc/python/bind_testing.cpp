// For tests: what is left behind, and moments that a program reaches only with luck.
#include <pybind11/functional.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "features/executables.h"
#include "features/outdated_tensors.h"
#include "host/tensors.h"
#include "python/bind.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "registry/tallies.h"
#include "step/planner.h"

namespace torch_xla_donate {

namespace {

// Finds and claims marks as a step does, and ends as one that does not run. Returns how many donors were claimed.
std::size_t ClaimMarks(const py::list& tensors, const std::function<void()>& between, bool refuse) {
  std::vector<lazy::BackendDataPtr> buffers;
  for (const py::handle tensor : tensors) {
    buffers.push_back(abi::Resolve(TensorOf(tensor)).buffer);
  }
  std::vector<Steps::Offer> offers;
  std::vector<Refusal> refused;
  for (const Marks::PendingMark& mark : Marks::Get().Among(buffers)) {
    if (refuse) {
      refused.push_back({mark.donor, ReasonCode::kGivenUp, /*notify=*/false});
    } else {
      offers.push_back({mark.donor});
    }
  }
  between();
  const StepPtr step = Steps::Get().Claim(offers, std::move(refused)).step;
  const std::size_t donors = step == nullptr ? 0 : step->donors.size() + step->refused.size();
  if (step != nullptr) {
    Steps::Get().Abandon(step, ReasonCode::kGivenUp);
  }
  return donors;
}

}  // namespace

void BindTesting(py::module_& m) {
  m.def(
      "note_error", [](const std::string& error) { Tallies::Get().NoteError(error.c_str()); }, py::arg("error"),
      "Notes an error, as a hook does that continues after it.");
  m.def("claim_marks", &ClaimMarks, py::arg("tensors"), py::arg("between"), py::arg("refuse"),
        "Finds the marks of tensors, calls a function, and claims or refuses the marks as a step does.");
  m.def(
      "sizes",
      [] {
        const Steps::Counts steps = Steps::Get().Size();
        const OutdatedTensors::Counts tensors = OutdatedTensors::Get().Size();
        return py::dict("pending"_a = Marks::Get().Size(), "consumed"_a = steps.consumed,
                        "just_consumed"_a = steps.just_consumed, "undonated"_a = steps.undonated,
                        "steps"_a = steps.kept, "outcomes"_a = steps.outcomes,
                        "auto_plans"_a = DonorPlanner::Get().Size(), "bases"_a = tensors.bases,
                        "outdated"_a = tensors.outdated, "executables"_a = NotedExecutables());
      },
      "How many entries the registry and the features hold.");
}

}  // namespace torch_xla_donate
