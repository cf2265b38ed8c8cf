// Automatic donation: the switch, the inputs and steps that it has skipped, and the reasons.
#include <pybind11/stl.h>

#include <string>
#include <utility>
#include <vector>

#include "features/auto_donors.h"
#include "features/donor_plans.h"
#include "python/bind.h"
#include "registry/registry.h"
#include "step/thread_step.h"

namespace torch_xla_donate {

void BindAuto(py::module_& m) {
  py::class_<HeldInput>(m, "HeldInput", "An input that automatic donation has not donated.")
      .def_readonly("array", &HeldInput::array, "As XLA writes it, without layout.")
      .def_readonly("bytes", &HeldInput::bytes, "Of the whole array.")
      .def_property_readonly(
          "device", [](const HeldInput& input) { return input.device.toString(); }, "Such as CPU:0.")
      .def_readonly("by_tensor", &HeldInput::by_tensor, "Whether a live tensor holds it; else pending work reads it.")
      .def_property_readonly(
          "buffer", [](const HeldInput& input) { return reinterpret_cast<std::uintptr_t>(input.buffer.lock().get()); },
          "As in identity; 0 if it was freed.");
  m.def("set_auto_donate", &SetAutoDonate, py::arg("on"), "Whether steps of all threads donate by liveness.");
  m.def("auto_donate_is_default", &AutoDonateIsDefault, "The value that set_auto_donate has set.");
  m.def("push_auto_donate", &PushAutoDonate, py::arg("on"),
        "Whether this thread's steps donate by liveness until a pop_auto_donate ends it.");
  m.def("auto_donate_depth", &AutoDonateDepth, "How many push_auto_donate are in effect on this thread.");
  m.def("pop_auto_donate", &PopAutoDonate, py::arg("depth"), "Ends this thread's pushes beyond that depth.");
  m.def("auto_donates", &AutoDonates, "Whether this thread's steps donate by liveness.");
  m.def(
      "note_auto_refusal", [](const Reason& reason) { DonationRegistry::Get().NoteAutoRefusal(reason); },
      py::arg("reason"), "Counts a step that automatic donation has skipped for this reason.");
  m.def(
      "auto_refusals",
      [] {
        const auto refusals = DonationRegistry::Get().AutoRefusals();
        return std::vector<std::pair<Reason, std::uint64_t>>(refusals.begin(), refusals.end());
      },
      "How many steps automatic donation has skipped, by reason.");
  m.def(
      "auto_held", [] { return DonorPlanner::Get().LastHeld(); },
      "Inputs of each device's last step that an output could have taken if nothing had held them; none if that step "
      "donated nothing automatically.");
  m.def("set_one_of_many", &SetMultiProcess, py::arg("on"),
        "Whether other processes run the same program. Their steps must have the same donors.");
}

}  // namespace torch_xla_donate
