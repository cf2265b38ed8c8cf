// Wraps Python's functions for the hooks.
#include "python/callbacks.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "features/switches.h"
#include "features/use_guard.h"
#include "registry/tallies.h"
#include "step/callbacks.h"

namespace torch_xla_donate {

namespace {

// Throws the Python error as torch's own exception, which keeps it through any host code.
[[noreturn]] void PassOn(py::error_already_set& error) {
  error.restore();
  python_error ours;
  ours.persist();
  throw ours;
}

std::string DescribeUse(const DonorSnapshot& donor, std::uint64_t step, const py::object& format) {
  if (Py_IsInitialized() == 0) {
    return donor.Shape() + " was donated at " + WhereOf(donor);
  }
  py::gil_scoped_acquire gil;
  try {
    // A signal may have arrived while the thread waited for the step. Its handler must run here, not inside NamesOf().
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    return format(NamesOf(donor), donor.Shape(), WhereOf(donor), step).cast<std::string>();
  } catch (py::error_already_set& error) {
    PassOn(error);
  }
}

// A warning filter may turn the warning into an error.
void TellReuse(const DonorSnapshot& donor, std::uint64_t step, const py::object& report) {
  if (Py_IsInitialized() == 0) {
    return;
  }
  py::gil_scoped_acquire gil;
  try {
    report(NamesOf(donor), donor.Shape(), WhereOf(donor), step);
  } catch (py::error_already_set& error) {
    PassOn(error);
  }
}

PyObject* run_recorder = nullptr;  // set before the first run is logged, never freed

std::vector<StackFrame> PythonStack() {
  constexpr std::size_t kDeepest = 64;
  std::vector<StackFrame> stack;
  const py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame && !frame.is_none() && stack.size() < kDeepest) {
    const py::object name = py::dict(frame.attr("f_globals")).attr("get")("__name__", "");
    stack.push_back(
        {py::str(name), py::str(frame.attr("f_code").attr("co_filename")), frame.attr("f_lineno").cast<int>()});
    frame = frame.attr("f_back");
  }
  return stack;
}

// As Py_AddPendingCall() wants it: an error of the recorder, such as one of a signal's handler, reaches the program.
int RecordRuns(void*) {
  const py::object result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(run_recorder));
  return result ? 0 : -1;
}

}  // namespace

std::string NamesOf(const DonorSnapshot& donor) {
  std::vector<std::string> found;
  for (const Mark& mark : donor.marks) {
    try {
      const py::handle names(static_cast<PyObject*>(mark.site->names.get()));
      auto name = names.attr("name")(mark.leaf).cast<std::string>();
      if (!name.empty() && std::find(found.begin(), found.end(), name) == found.end()) {
        found.push_back(std::move(name));
      }
    } catch (py::error_already_set& error) {  // from the user's own containers
      if (!error.matches(PyExc_Exception)) {
        throw;
      }
      Tallies::Get().NoteError(error.what());
    } catch (const py::cast_error& error) {
      Tallies::Get().NoteError(error.what());
    }
  }
  std::string result;
  for (const std::string& name : found) {
    result += (result.empty() ? "" : ", ") + name;
  }
  return result;
}

std::string WhereOf(const DonorSnapshot& donor) {
  const CallSite* site = donor.StrictestSite();
  return site == nullptr ? "" : site->where;
}

void SetCallbacks(py::object donated_buffer_error, py::object format_use, py::object report_reuse,
                  py::object step_ended, py::object prepare_auto, py::object set_collectives_token,
                  py::object auto_sharding) {
  HookCallbacks callbacks;
  callbacks.donated_buffer_error = donated_buffer_error.release().ptr();
  auto* format = new py::object(std::move(format_use));
  auto* reuse = new py::object(std::move(report_reuse));
  auto* ended = new py::object(std::move(step_ended));
  auto* prepare = new py::object(std::move(prepare_auto));
  auto* set_token = new py::object(std::move(set_collectives_token));
  auto* is_auto_sharding = new py::object(std::move(auto_sharding));
  callbacks.describe_use = [format](const DonorSnapshot& donor, std::uint64_t step) {
    return DescribeUse(donor, step, *format);
  };
  callbacks.report_reuse = [reuse](const DonorSnapshot& donor, std::uint64_t step) { TellReuse(donor, step, *reuse); };
  callbacks.step_ended = [ended] {
    py::gil_scoped_acquire gil;
    (*ended)();
  };
  callbacks.prepare_auto = [prepare]() -> Reason {
    py::gil_scoped_acquire gil;
    try {
      return (*prepare)().cast<Reason>();
    } catch (py::error_already_set& error) {
      PassOn(error);
    }
  };
  callbacks.forget_collectives = [set_token, is_auto_sharding](const std::string& device) {
    py::gil_scoped_acquire gil;
    (*set_token)(device, py::none());
    if ((*is_auto_sharding)().cast<bool>()) {
      SetSwitchedOff(ReasonCode::kAutoSharding);
    }
  };
  callbacks.python_stack = &PythonStack;
  callbacks.record_runs = [] {
    py::gil_scoped_acquire gil;
    if (RecordRuns(nullptr) != 0) {
      throw py::error_already_set();
    }
  };
  // Needs no GIL. Python's list of pending calls may be full, with calls that take all logged runs.
  callbacks.record_runs_soon = [] { Py_AddPendingCall(&RecordRuns, nullptr); };
  Callbacks() = std::move(callbacks);
}

void SetRunRecorder(py::object record) { run_recorder = record.release().ptr(); }

void RegisterExceptions() {
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) {
        std::rethrow_exception(error);
      }
    } catch (DonatedBufferAccess& access) {
      PyErr_SetString(access.python_type(), access.what());
    } catch (python_error& raised) {
      raised.restore();
    }
  });
}

}  // namespace torch_xla_donate
