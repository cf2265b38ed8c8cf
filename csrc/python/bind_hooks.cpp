// Installs the hooks, and checks their assumptions.
#include "features/run_guard.h"
#include "host/graphs.h"
#include "python/bind.h"
#include "python/callbacks.h"
#include "python/frames.h"
#include "step/hooks.h"

namespace torch_xla_donate {

void BindHooks(py::module_& m) {
  RegisterExceptions();
  m.def("set_callbacks", &SetCallbacks, py::arg("donated_buffer_error"), py::arg("format_use"), py::arg("report_reuse"),
        py::arg("step_ended"), py::arg("prepare_auto"), py::arg("set_collectives_token"), py::arg("auto_sharding"),
        py::arg("eager_mode"),
        "Gives the hooks an exception type, the function that writes its message, and functions to call when an "
        "undonated donor is used, at the end of a step, and before the first step that donates automatically. "
        "The last three are functions of torch_xla that run no Python code. A step that may donate drops the token of "
        "collectives by the first and checks for auto-sharding by the second.");
  m.def(
      "install", &InstallHooks, py::arg("library_path"),
      "Patches torch_xla's extension module and libtorch_cpu. If it cannot, it restores both and raises RuntimeError.");
  m.def("uninstall", &UninstallHooks, "Restores the slots; returns how many hold another patch.");
  m.def("installed", &HooksInstalled, "Whether the hooks are in place.");
  m.def(
      "hooks",
      [] {
        py::list result;
        for (const HookInfo& hook : Hooks()) {
          result.append(py::dict("name"_a = hook.name, "library"_a = hook.library, "symbol"_a = hook.symbol,
                                 "purpose"_a = hook.purpose, "slots"_a = hook.slots, "in_place"_a = hook.in_place));
        }
        return result;
      },
      "The table of hooks: name, library, symbol, purpose, slots patched and slots still in place.");
  m.def(
      "verify_layouts",
      [](py::handle probe, std::int64_t id, bool is_sharded) { abi::VerifyLayouts(TensorOf(probe), id, is_sharded); },
      py::arg("probe"), py::arg("tensor_id"), py::arg("is_sharded") = false,
      "Compares an uploaded int32[3] tensor with the assumed layouts; RuntimeError names the first difference.");
  m.def(
      "frame_variables",
      [](py::handle frame) {
        if (!PyFrame_Check(frame.ptr())) {
          throw py::type_error(std::string("expected a frame, got ") + Py_TYPE(frame.ptr())->tp_name);
        }
        PyObject* found = FrameVariables(reinterpret_cast<PyFrameObject*>(frame.ptr()));
        if (found == nullptr) {
          throw py::error_already_set();
        }
        return py::reinterpret_steal<py::dict>(found);
      },
      py::arg("frame"), "A copy of a frame's local variables. Does not touch the dictionary of `locals()`.");
}

}  // namespace torch_xla_donate
