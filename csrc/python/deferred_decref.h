// Defers the release of Python objects whose last owner has no GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "registry/process_mutex.h"

namespace torch_xla_donate {

namespace py = pybind11;

// A call's `names` object may lose its last owner on a thread without the GIL. The next call that marks tensors then
// releases it.
struct DeferredDecrefs {
  std::mutex& mutex = ProcessMutex(MutexOf::kDeferredDecrefs);
  std::vector<PyObject*> objects;

  static DeferredDecrefs& Get() {
    static DeferredDecrefs* decrefs = new DeferredDecrefs();
    return *decrefs;
  }
  void Defer(PyObject* object) {
    std::lock_guard<std::mutex> lock(mutex);
    objects.push_back(object);
  }
  void Run() {
    std::vector<PyObject*> taken;
    {
      std::lock_guard<std::mutex> lock(mutex);
      taken.swap(objects);
    }
    for (PyObject* object : taken) {
      Py_DECREF(object);
    }
  }
};

inline std::shared_ptr<void> Share(py::object names) {
  return {names.release().ptr(), [](void* object) { DeferredDecrefs::Get().Defer(static_cast<PyObject*>(object)); }};
}

}  // namespace torch_xla_donate
