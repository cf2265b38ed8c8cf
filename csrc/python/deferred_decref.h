// Defers the release of Python objects whose last owner has no GIL.
//
// Threads: any; a stack without a lock, so that a forked child can use it. Errors: only Share() throws.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <memory>

namespace torch_xla_donate {

namespace py = pybind11;

// A call's `names` object may lose its last owner on a thread without the GIL. The next call that marks tensors then
// releases it. The memory for that is taken here, because a destructor cannot fail.
struct DeferredDecref {
  PyObject* object;
  DeferredDecref* next = nullptr;
};
inline std::atomic<DeferredDecref*> deferred_decrefs{nullptr};

inline void RunDeferredDecrefs() {
  for (DeferredDecref* one = deferred_decrefs.exchange(nullptr); one != nullptr;) {
    const std::unique_ptr<DeferredDecref> taken(one);
    one = taken->next;
    Py_DECREF(taken->object);
  }
}

inline std::shared_ptr<void> Share(py::object names) {
  auto* own = new DeferredDecref{names.ptr()};
  return {names.release().ptr(), [own](void*) {
            own->next = deferred_decrefs.load();
            while (!deferred_decrefs.compare_exchange_weak(own->next, own)) {
            }
          }};
}

}  // namespace torch_xla_donate
