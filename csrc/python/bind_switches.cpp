// Contexts, and the switches that keep a thread or the process from donating.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <new>
#include <optional>
#include <string>
#include <utility>

#include "features/switches.h"
#include "python/bind.h"
#include "step/graph_arrays.h"

namespace torch_xla_donate {

namespace {

#define X(code, name) name,
constexpr std::array kReasonCodes = {TORCH_XLA_DONATE_REASON_CODES(X)};
#undef X

Reason MakeReason(const std::string& code, std::string details) {
  const auto found = std::find(kReasonCodes.begin(), kReasonCodes.end(), code);
  if (found == kReasonCodes.end()) {
    throw py::value_error("no reason has the code " + code);
  }
  return {static_cast<ReasonCode>(found - kReasonCodes.begin()), std::move(details)};
}

// A context that an interrupt cannot leave half entered or half left. Python checks for signals between calls and at
// the start of each function. So it may interrupt a context manager written in Python before `with` knows that it has
// been entered, or before the first line of its __exit__. Here `with` calls C++ functions. If a signal handler's
// exception or a lack of memory stops `leave`, they call it again, so `leave` must allow that. `depth` shows it what is
// left to undo.
struct Scope {
  // Unlike std::thread::id, no later thread gets it again.
  static std::uint64_t ThisThread() { return PyThreadState_GetID(PyThreadState_Get()); }

  py::object lock;  // held inside the context; None if not needed
  int held = 0;
  std::map<std::uint64_t, std::size_t> depths = {};  // how often each thread is inside, by ThisThread()

  void Acquire() {
    if (!lock.is_none()) {
      lock.attr("acquire")();
      ++held;
    }
  }
  void Release() {
    if (held > 0) {
      --held;
      lock.attr("release")();
    }
  }
};

void Leave(const py::object& self, bool raised) {
  constexpr int kAttempts = 10;
  std::optional<py::error_already_set> failure;
  for (int attempt = 1; attempt <= kAttempts; ++attempt) {
    try {
      self.attr("leave")(raised);
      break;
    } catch (py::error_already_set& error) {
      if (!failure.has_value()) {
        failure.emplace(error);
      }
    }
  }
  Scope& scope = self.cast<Scope&>();
  const auto depth = scope.depths.find(Scope::ThisThread());
  if (depth != scope.depths.end() && --depth->second == 0) {
    scope.depths.erase(depth);
  }
  try {
    scope.Release();
  } catch (py::error_already_set& error) {
    if (!failure.has_value()) {
      throw;
    }
    error.discard_as_unraisable("leaving a context");
  }
  if (failure.has_value()) {
    throw py::error_already_set(*failure);
  }
}

py::object Enter(const py::object& self) {
  Scope& scope = self.cast<Scope&>();
  scope.Acquire();
  try {
    ++scope.depths[Scope::ThisThread()];
  } catch (const std::bad_alloc&) {
    scope.Release();
    throw;
  }
  try {
    self.attr("enter")();
  } catch (const py::error_already_set&) {
    Leave(self, /*raised=*/true);
    throw;
  }
  return self;
}

void Exit(const py::object& self, const py::object& kind, const py::object&, const py::object&) {
  if (self.cast<Scope&>().depths.count(Scope::ThisThread()) == 0) {
    return;  // another thread has entered it, such as one that began the generator around it
  }
  const bool raised = !kind.is_none();
  try {
    if (!raised) {
      self.attr("finish")();
    }
  } catch (const py::error_already_set&) {
    Leave(self, /*raised=*/true);
    throw;
  }
  Leave(self, raised);
}

}  // namespace

void BindSwitches(py::module_& m) {
  py::class_<Reason>(m, "Reason", "Why a donor was not donated, or why a step has no donors.")
      .def(py::init(&MakeReason), py::arg("code") = "none", py::arg("details") = "")
      .def_property_readonly(
          "code", [](const Reason& reason) { return kReasonCodes[static_cast<std::size_t>(reason.code)]; },
          "One of reason_codes.")
      .def_readonly("details", &Reason::details, "Details for the sentence.")
      .def("__bool__", [](const Reason& reason) { return !reason.empty(); });
  m.def("reason_codes", [] { return kReasonCodes; }, "All codes; _report/reasons.py has a sentence for each.");
  py::class_<Scope>(m, "Scope", py::dynamic_attr(),
                    "Base of contexts that an interrupt cannot leave half entered or half left. Subclasses have "
                    "enter(), finish() and leave(raised). finish() runs before leave() if nothing was raised; leave() "
                    "may be called again. The context holds the lock.")
      .def(py::init([](py::object lock) { return Scope{std::move(lock)}; }), py::arg("lock") = py::none())
      .def("enter", [](const py::object&) {})
      .def(
          "leave", [](const py::object&, bool) {}, py::arg("raised"))
      .def("finish", [](const py::object&) {})
      .def_property_readonly(
          "depth",
          [](const Scope& scope) {
            const auto found = scope.depths.find(Scope::ThisThread());
            return found == scope.depths.end() ? 0 : found->second;
          },
          "How often this thread is inside the context, also while it is being entered or left.")
      .def("__enter__", &Enter)
      .def("__exit__", &Exit, py::arg("kind"), py::arg("error"), py::arg("trace"));
  py::class_<ModeEntry>(m, "Mode", "While it is on, this thread's steps follow it. on() and off() may be repeated.")
      .def(py::init([](std::optional<bool> automatic, bool disabled, bool report_reuse, bool check_outputs,
                       bool check_infinities) {
             return ModeEntry({automatic, disabled, report_reuse, check_outputs, check_infinities});
           }),
           py::arg("automatic") = py::none(), py::arg("disabled") = false, py::arg("report_reuse") = false,
           py::arg("check_outputs") = false, py::arg("check_infinities") = false)
      .def("on", &ModeEntry::On)
      .def("off", &ModeEntry::Off);
  m.def("disabled", &DonationDisabled, "Whether donation is disabled on this thread.");
  m.def("disabled_reason", &DisabledReason,
        "The context that has disabled donation on this thread; empty if none has.");
  m.def(
      "set_switched_off",
      [](const std::string& setting) {
        SetSwitchedOff(setting.empty() ? Reason() : Reason(ReasonCode::kIgnored, setting));
      },
      py::arg("setting"), "Names the setting that makes torch_xla ignore every donor; empty for none.");
  m.def("switched_off", &SwitchedOffReason, "The reason that set_switched_off has set.");
  m.def(
      "keep_order", &SetKeepOrder, py::arg("on"),
      "Whether steps keep the order of their parameters and outputs, even if XLA copies then. For the process, before "
      "its first step.");
  m.def("set_debug_process", &SetDebugProcess, py::arg("on"),
        "Whether every thread disables donation, reports uses and notes outputs.");
  m.def(
      "environment",
      [](const std::string& name) {
        // NOLINTNEXTLINE(concurrency-mt-unsafe): Python changes the environment with the GIL
        const char* const value = std::getenv(name.c_str());
        return value == nullptr ? std::nullopt : std::optional<std::string>(value);
      },
      py::arg("name"), "An environment variable as torch_xla reads it; None if it is not set.");
}

}  // namespace torch_xla_donate
