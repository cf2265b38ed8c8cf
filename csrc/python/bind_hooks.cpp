// Installing the hooks, and checking what they rely on.
#include "features/run_guard.h"
#include "host/verify.h"
#include "python/bind.h"
#include "python/callbacks.h"
#include "step/hooks.h"

namespace torch_xla_donate {

void BindHooks(py::module_& m) {
  RegisterExceptions();
  m.def(
      "set_callbacks", &SetCallbacks, py::arg("donated_buffer_error"), py::arg("format_use"), py::arg("report_reuse"),
      py::arg("step_ended"), py::arg("prepare_auto"), py::arg("set_collectives_token"), py::arg("auto_sharding"),
      "Lends the hooks an exception type, the text of its message, and what to call where a spared donor is used, at "
      "the end of a step, and before the first step that donates automatically; and two functions of torch_xla, which "
      "are not Python code: a step that may donate drops the token of collectives by the one, and asks the other "
      "whether auto-sharding is on.");
  m.def("install", &InstallHooks, py::arg("library_path"),
        "Patches the extension module of torch_xla; RuntimeError if that cannot be done completely.");
  m.def("uninstall", &UninstallHooks, "Puts the module back; the number of slots that somebody else holds.");
  m.def("installed", &HooksInstalled, "Whether the hooks are in place.");
  m.def(
      "hooks",
      [] {
        py::list result;
        for (const HookInfo& hook : Hooks()) {
          py::dict item;
          item["name"] = hook.name;
          item["library"] = hook.library;
          item["symbol"] = hook.symbol;
          item["purpose"] = hook.purpose;
          item["slots"] = hook.slots;
          item["in_place"] = hook.in_place;
          result.append(item);
        }
        return result;
      },
      "The table of hooks: name, library, symbol, purpose, slots patched and slots still in place.");
  m.def(
      "verify_layouts", [](py::handle probe, std::int64_t id) { abi::VerifyLayouts(TensorOf(probe), id); },
      py::arg("probe"), py::arg("tensor_id"),
      "Compares an uploaded int32[3] tensor with the layouts relied on; RuntimeError names the first difference.");
  m.def("verify_executor", &VerifyExecutor, py::arg("eager_mode"), py::arg("allow_execution"),
        "Compares torch_xla's executor with the layout relied on, and with what it says of itself; RuntimeError if it "
        "differs.");
}

}  // namespace torch_xla_donate
