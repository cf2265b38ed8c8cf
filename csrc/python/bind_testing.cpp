// Counts by which tests check that nothing is left behind.
#include <string>

#include "features/executables.h"
#include "features/outdated_tensors.h"
#include "python/bind.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "registry/tallies.h"
#include "step/planner.h"

namespace torch_xla_donate {

void BindTesting(py::module_& m) {
  m.def(
      "note_error", [](const std::string& error) { Tallies::Get().NoteError(error.c_str()); }, py::arg("error"),
      "Notes an error, as a hook does that continues after it.");
  m.def(
      "sizes",
      [] {
        const Steps::Counts steps = Steps::Get().Size();
        py::dict result;
        result["pending"] = Marks::Get().Size();
        result["consumed"] = steps.consumed;
        result["undonated"] = steps.undonated;
        result["steps"] = steps.kept;
        result["outcomes"] = steps.outcomes;
        result["auto_plans"] = DonorPlanner::Get().Size();
        result["bases"] = OutdatedTensors::Get().Size().bases;
        result["outdated"] = OutdatedTensors::Get().Size().outdated;
        result["executables"] = NotedExecutables();
        return result;
      },
      "How many entries the registry and the features hold.");
}

}  // namespace torch_xla_donate
