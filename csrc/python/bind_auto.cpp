// Automatic donation: the switch, the inputs and steps that it has skipped, and the reasons.
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "features/outdated_tensors.h"
#include "features/switches.h"
#include "features/watched_inputs.h"
#include "host/tensors.h"
#include "host/views.h"
#include "python/bind.h"
#include "registry/tallies.h"
#include "step/planner.h"

namespace torch_xla_donate {

namespace {
constexpr const char* kUses[] = {"updated_in_place", "marked", "free", "held", "read_later", "other"};  // by InputUse
}  // namespace

void BindAuto(py::module_& m) {
  py::class_<HeldInput>(m, "HeldInput", "An input that automatic donation has not donated.")
      .def_property_readonly("array", &HeldInput::Array, "As XLA writes it, without layout.")
      .def_property_readonly(
          "device", [](const HeldInput& input) { return input.device.toString(); }, "Such as CPU:0.")
      .def_readonly("by_tensor", &HeldInput::by_tensor, "Whether a live tensor holds it; else pending work reads it.")
      .def_property_readonly(
          "buffer", [](const HeldInput& input) { return reinterpret_cast<std::uintptr_t>(input.buffer.lock().get()); },
          "As in identity; 0 if it was freed.");
  m.def("set_auto_donate", &SetAutoDonate, py::arg("on"), "Whether steps of all threads donate by liveness.");
  m.def("auto_donates", &AutoDonates, "Whether this thread's steps donate by liveness.");
  m.def(
      "note_auto_refusal", [](const Reason& reason) { Tallies::Get().NoteAutoRefusal(reason); }, py::arg("reason"),
      "Counts a step that automatic donation has skipped for this reason.");
  m.def(
      "auto_refusals",
      [] {
        const auto refusals = Tallies::Get().AutoRefusals();
        return std::vector<std::pair<Reason, std::uint64_t>>(refusals.begin(), refusals.end());
      },
      "How many steps automatic donation has skipped, by reason.");
  m.def(
      "auto_held", [] { return DonorPlanner::Get().LastHeld(); },
      "Inputs of each device's last step that an output could have taken if nothing had held them; none if that step "
      "ran without automatic donation.");
  py::class_<WatchedInput>(m, "WatchedInput", "An input of a watched step.")
      .def_readonly("array", &WatchedInput::array, "As XLA writes it, with its sharding.")
      .def_property_readonly(
          "use", [](const WatchedInput& input) { return kUses[static_cast<int>(input.use)]; },
          "'updated_in_place', 'marked' (donors), 'free', 'held' (an output could take it) or 'other'.")
      .def_readonly("tensor", &WatchedInput::tensor, "The alias id of the tensor that it is from; None if unknown.")
      .def_readonly("preferred_output", &WatchedInput::preferred_output,
                    "The alias id of the output that takes it, or could; None for none.")
      .def_readonly("seen_before", &WatchedInput::seen_before, "Whether an earlier watched step has read it.")
      .def_readonly("buffer", &WatchedInput::buffer, "As in identity, if a tensor still holds it.");
  py::class_<WatchedStep>(m, "WatchedStep", "A step since watch_inputs.")
      .def_readonly("reason", &WatchedStep::reason, "Why it donates nothing; empty if it may donate.")
      .def_readonly("automatic", &WatchedStep::automatic, "Whether it donates free inputs.")
      .def_readonly("inputs", &WatchedStep::inputs, "In the order of the graph.")
      .def_readonly("outputs", &WatchedStep::outputs, "The alias id of each.");
  m.def("watch_inputs", &WatchInputs, py::arg("on"), "Whether steps note their inputs, in all threads.");
  m.def("take_watched_step", &TakeWatchedStep, "The last step of this thread since the last call; None for none.");
  m.def(
      "last_write",
      [](py::handle tensor) -> py::object {
        const auto write = OutdatedTensors::Get().LastWrite(TensorOf(tensor));
        return write == nullptr ? py::object(py::none()) : py::make_tuple(write->stack, write->is_of_part);
      },
      py::arg("tensor"),
      "The frames that last wrote the tensor or an alias of it while inputs were watched, as take_runs has them, and "
      "whether they wrote through a view; None if unknown.");
  m.def(
      "alias_ids",
      [](py::handle tensor) {
        std::vector<std::int64_t> ids;
        for (const abi::TensorData* data : abi::ValuesOf(TensorOf(tensor))) {
          ids.push_back(abi::AliasId(*data));
        }
        return ids;
      },
      py::arg("tensor"),
      "Numbers for the value of a tensor, and for the value that writes to parts of it have given it since. Updates in "
      "place keep them. Applies no pending updates. Empty for a tensor of another backend.");
  m.def(
      "array_of",
      [](py::handle tensor) {
        const lazy::BackendDataPtr buffer = abi::BufferOfValue(TensorOf(tensor));
        return buffer == nullptr ? "" : abi::DescribeBuffer(*buffer);
      },
      py::arg("tensor"),
      "The array that a tensor holds as XLA writes it, with its sharding. Does not apply pending updates. Empty if it "
      "holds none.");
  m.def(
      "set_one_of_many", [](bool on) { DonorPlanner::Get().SetMultiProcess(on); }, py::arg("on"),
      "Whether other processes run the same program. Their steps must have the same donors.");
}

}  // namespace torch_xla_donate
