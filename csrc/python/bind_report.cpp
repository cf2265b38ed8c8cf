// The outcomes of donors and checked outputs, for the report.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "features/executables.h"
#include "features/output_check.h"
#include "host/array_text.h"
#include "host/graphs.h"
#include "python/bind.h"
#include "python/callbacks.h"
#include "registry/marks.h"
#include "registry/steps.h"
#include "registry/tallies.h"
#include "step/graph_arrays.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

namespace {

// A donor as XLA writes it. Does not read a consumed buffer.
std::string ArrayOf(const DonorSnapshot& donor) {
  const lazy::BackendDataPtr buffer =
      donor.array.empty() && donor.state != DonorState::kDonated ? donor.buffer.lock() : nullptr;
  return buffer == nullptr ? donor.array : abi::DescribeBuffer(*buffer);
}

// py::dict(name = value, ...) looks for each name before it sets it, which benchmarks/growth.py shows for a report.
template <typename... Values>
py::dict DictOf(const std::pair<const char*, Values>&... items) {
  py::dict result;
  ((result[items.first] = items.second), ...);
  return result;
}

py::dict DonorDict(const DonorSnapshot& donor) {
  static const char* const states[] = {"pending", "claimed", "donated", "unusable", "cancelled"};
  const std::string array = ArrayOf(donor);
  return DictOf(std::pair("name", NamesOf(donor)), std::pair("marks", donor.marks.size()),
                std::pair("where", WhereOf(donor)), std::pair("strict", static_cast<int>(donor.Strict())),
                std::pair("shape", donor.Shape()), std::pair("bytes", donor.bytes), std::pair("array", array),
                std::pair("bytes_per_device", MemoryPerDevice(array, SizeRule::kBytes).value_or(donor.bytes)),
                std::pair("size", SizeOf(array, /*unsharded=*/false).value_or(donor.bytes)),
                std::pair("buffer", reinterpret_cast<std::uintptr_t>(donor.buffer.lock().get())),
                std::pair("device", donor.device.toString()),
                std::pair("outcome", states[static_cast<int>(donor.state)]), std::pair("reason", donor.reason),
                std::pair("reported", donor.reported), std::pair("automatic", donor.automatic),
                std::pair("parameter", donor.parameter), std::pair("preferred_output", donor.preferred_output),
                std::pair("requested", donor.requested));
}

py::list StepDicts(const std::vector<StepSnapshot>& steps) {
  py::list result;
  for (const StepSnapshot& step : steps) {
    py::list donors;
    for (const DonorSnapshot& donor : step.donors) {
      donors.append(DonorDict(donor));
    }
    result.append(py::dict("number"_a = step.number, "graph"_a = step.graph_hash, "donors"_a = donors,
                           "outputs"_a = step.outputs, "compilations"_a = step.compilations,
                           "plain_steps"_a = step.plain_steps));
  }
  return result;
}

py::dict TallyDict(const StepTally& tally) {
  const auto [counts, unusable] = Tallies::Get().Read(tally);
  return py::dict("steps"_a = counts.steps, "plain_steps"_a = counts.plain_steps,
                  "offered_bytes"_a = counts.offered_bytes, "donated_bytes"_a = counts.donated_bytes,
                  "unusable"_a = StepDicts(Steps::Get().Snapshots(unusable)));
}

py::list BadOutputDicts(const std::vector<BadOutput>& outputs) {
  py::list result;
  for (const BadOutput& output : outputs) {
    result.append(py::dict("compiled"_a = output.compiled,
                           "buffer"_a = reinterpret_cast<std::uintptr_t>(output.buffer.lock().get()),
                           "index"_a = output.index, "outputs"_a = output.outputs, "array"_a = output.array,
                           "values"_a = output.values, "nans"_a = output.nans, "infs"_a = output.infs));
  }
  return result;
}

py::list TakeRuns() {
  py::list result;
  for (const LoggedRun& run : TakeLoggedRuns()) {
    result.append(py::dict("executable"_a = run.executable, "graph"_a = run.graph, "has_donors"_a = run.has_donors,
                           "header"_a = run.header, "memory"_a = run.memory, "stack"_a = run.stack));
  }
  return result;
}

}  // namespace

void BindReport(py::module_& m) {
  m.def(
      "hook_errors", [] { return Tallies::Get().Errors(); },
      "How often a hook has continued without donation, or without a check, after an error, by error.");
  m.def(
      "steps",
      [](std::optional<std::size_t> last) {
        std::vector<StepPtr> steps = Steps::Get().Kept();
        // They end in any order.
        std::sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) { return a->number < b->number; });
        steps.erase(steps.begin(),
                    steps.end() - static_cast<std::ptrdiff_t>(std::min(last.value_or(steps.size()), steps.size())));
        return StepDicts(Steps::Get().Snapshots(steps));
      },
      py::arg("last") = py::none(), "The last kept steps with donors, or all of them, oldest first.");
  py::class_<StepTally, std::shared_ptr<StepTally>>(
      m, "StepTally", "Counts the steps that begin while it is open, on the thread that opens it or on all threads.")
      .def(py::init<>())
      .def(
          "open",
          [](const std::shared_ptr<StepTally>& tally, bool all_threads) { Tallies::Get().Open(tally, all_threads); },
          py::arg("all_threads"))
      .def(
          "close", [](const std::shared_ptr<StepTally>& tally) { Tallies::Get().Close(tally); }, "May be called again.")
      .def("read", &TallyDict,
           "The number of steps, bytes offered and donated of those that have ended, and the first unusable ones.");
  m.def(
      "pending",
      [] {
        py::list result;
        for (const DonorSnapshot& donor : Marks::Get().Pending()) {
          result.append(DonorDict(donor));
        }
        return result;
      },
      "The marks that no step has read yet.");
  m.def(
      "take_notices",
      [](bool everywhere) {
        return StepDicts(Steps::Get().TakeNotices(everywhere ? std::nullopt : ThreadStep::Get().last_device));
      },
      py::arg("everywhere") = true,
      "Returns and clears the steps with unusable donations that were not reported yet. Donors reported before have "
      "reported=True. Without everywhere, only steps of the device of this thread's last step, if it has one.");
  m.def("has_notices", [] { return Steps::Get().HasNotices(); }, "Whether take_notices would return a step.");
  m.def(
      "log_runs",
      [](py::object record) {
        SetRunRecorder(std::move(record));
        LogRuns();
      },
      py::arg("record"),
      "From now on logs each run of a graph, and calls record() soon after it begins, and at the end of each step.");
  m.def("take_runs", &TakeRuns, "Returns and clears the logged runs, oldest first.");
  m.def(
      "wait_for_steps", [] { Steps::Get().Wait(); }, py::call_guard<py::gil_scoped_release>(),
      "Waits until the outcome of every step is known.");
  m.def(
      "graph_text", [](const std::string& graph) { return Steps::Get().GraphText(graph); }, py::arg("graph"),
      "The optimised HLO of a graph that has run with donors; None if torch_xla has dropped its executable.");
  m.def(
      "bytes_per_device", [](const std::string& array) { return MemoryPerDevice(array, SizeRule::kBytes); },
      py::arg("array"), "Of an array as XLA writes it, with its sharding; None if the text cannot be parsed.");
  m.def(
      "size_on_device", [](const std::string& array) { return SizeOf(array, /*unsharded=*/false); }, py::arg("array"),
      "The memory of such an array on a device, which XLA compares: padded to tiles on TPU. None if it cannot be "
      "parsed.");
  m.def(
      "force_size_rule",
      [](const std::optional<std::string>& platform) {
        const std::map<std::string, SizeRule> rules{
            {"cpu", SizeRule::kBytes}, {"tpu", SizeRule::kTiles}, {"tpu before v4", SizeRule::kTilesBeforeV4}};
        ForceSizeRule(platform ? std::optional(rules.at(*platform)) : std::nullopt);
      },
      py::arg("platform"),
      "Sizes arrays on this thread as on 'cpu', 'tpu' or 'tpu before v4'; None for the platform of this process.");
  m.def("is_even", &IsEven, py::arg("array"), "Whether the sharding of such an array cuts it into pieces of one size.");
  m.def(
      "take_bad_outputs",
      [] {
        std::vector<BadOutput> bad;
        {
          const py::gil_scoped_release release;
          bad = TakeBadOutputs();
        }
        return BadOutputDicts(bad);
      },
      "The outputs of this thread's runs since the last call that hold a NaN, or an infinity if a mode checks for "
      "them. Waits for the runs.");
}

}  // namespace torch_xla_donate
