// Calls Python's functions for the hooks.
#include "python/callbacks.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "features/use_guard.h"
#include "registry/tallies.h"
#include "step/callbacks.h"

namespace torch_xla_donate {

namespace {

// Set before the hooks are installed, the recorder before the first run is logged.
py::handle donated_buffer_error, format_use, report_reuse, step_ended, prepare_auto, set_collectives_token,
    auto_sharding, eager_mode, run_recorder;

// Throws the Python error as torch's own exception, which keeps it through any host code.
[[noreturn]] void PassOn(py::error_already_set& error) {
  error.restore();
  python_error ours;
  ours.persist();
  throw ours;
}

// As Py_AddPendingCall() wants it: an error of the recorder, such as one of a signal's handler, reaches the program.
int Record(void*) {
  const py::object result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(run_recorder.ptr()));
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

void SetCallbacks(py::object error, py::object format, py::object reuse, py::object ended, py::object prepare,
                  py::object set_token, py::object is_auto_sharding, py::object is_eager) {
  donated_buffer_error = error.release();
  format_use = format.release();
  report_reuse = reuse.release();
  step_ended = ended.release();
  prepare_auto = prepare.release();
  set_collectives_token = set_token.release();
  auto_sharding = is_auto_sharding.release();
  eager_mode = is_eager.release();
}

void SetRunRecorder(py::object record) { run_recorder = record.release(); }

PyObject* callbacks::DonatedBufferError() { return donated_buffer_error.ptr(); }

std::string callbacks::DescribeUse(const DonorSnapshot& donor, std::uint64_t step) {
  if (Py_IsInitialized() == 0) {
    return donor.Shape() + " was donated at " + WhereOf(donor);
  }
  py::gil_scoped_acquire gil;
  try {
    // A signal may have arrived while the thread waited for the step. Its handler must run here, not inside NamesOf().
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    return format_use(NamesOf(donor), donor.Shape(), WhereOf(donor), step).cast<std::string>();
  } catch (py::error_already_set& error) {
    PassOn(error);
  }
}

// A warning filter may turn the warning into an error.
void callbacks::ReportReuse(const DonorSnapshot& donor, std::uint64_t step) {
  if (Py_IsInitialized() == 0) {
    return;
  }
  py::gil_scoped_acquire gil;
  try {
    report_reuse(NamesOf(donor), donor.Shape(), WhereOf(donor), step);
  } catch (py::error_already_set& error) {
    PassOn(error);
  }
}

Reason callbacks::PrepareAuto() {
  py::gil_scoped_acquire gil;
  try {
    return prepare_auto().cast<Reason>();
  } catch (py::error_already_set& error) {
    PassOn(error);
  }
}

bool callbacks::ForgetCollectives(const std::string& device) {
  py::gil_scoped_acquire gil;
  set_collectives_token(device, py::none());
  return auto_sharding().cast<bool>();
}

bool callbacks::InEagerMode() {
  const py::gil_scoped_acquire gil;
  return eager_mode().cast<bool>();
}

void callbacks::StepEnded() {
  py::gil_scoped_acquire gil;
  step_ended();
}

std::vector<StackFrame> callbacks::PythonStack() {
  constexpr std::size_t kDeepest = 64;
  std::vector<StackFrame> stack;
  const py::gil_scoped_acquire gil;
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame && !frame.is_none() && stack.size() < kDeepest) {
    const py::object name = py::dict(frame.attr("f_globals")).attr("get")("__name__", "");
    const py::object line = frame.attr("f_lineno");  // None for code without a table of lines
    stack.emplace_back(py::str(name), py::str(frame.attr("f_code").attr("co_filename")),
                       line.is_none() ? 0 : line.cast<int>());
    frame = frame.attr("f_back");
  }
  return stack;
}

void callbacks::RecordRuns() {
  py::gil_scoped_acquire gil;
  if (Record(nullptr) != 0) {
    throw py::error_already_set();
  }
}

// Python's list of pending calls may be full, with calls that take all logged runs.
void callbacks::RecordRunsSoon() { Py_AddPendingCall(&Record, nullptr); }

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
