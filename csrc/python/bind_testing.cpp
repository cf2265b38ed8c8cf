// Counts by which tests check that nothing is left behind.
#include <string>

#include "features/donated_copies.h"
#include "features/outdated_tensors.h"
#include "features/run_log.h"
#include "python/bind.h"
#include "registry/registry.h"
#include "step/planner.h"

namespace torch_xla_donate {

void BindTesting(py::module_& m) {
  m.def(
      "note_error", [](const std::string& error) { DonationRegistry::Get().NoteError(error.c_str()); },
      py::arg("error"), "Notes an error, as a hook does that continues after it.");
  m.def(
      "sizes",
      [] {
        const DonationRegistry::Counts counts = DonationRegistry::Get().Size();
        py::dict result;
        result["pending"] = counts.pending;
        result["consumed"] = counts.consumed;
        result["spared"] = counts.spared;
        result["steps"] = counts.steps;
        result["outcomes"] = counts.outcomes;
        result["auto_plans"] = DonorPlanner::Get().Size();
        result["bases"] = OutdatedTensors::Get().Size().bases;
        result["outdated"] = OutdatedTensors::Get().Size().outdated;
        result["looked_at"] = GraphsLookedAt();
        result["logged"] = LoggedExecutables();
        return result;
      },
      "How many entries the registry and the features hold.");
}

}  // namespace torch_xla_donate
