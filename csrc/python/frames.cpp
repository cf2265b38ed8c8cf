// Reads the variables where each version of Python keeps them.
#include "python/frames.h"

#include <frameobject.h>

#include <initializer_list>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030D0000
#define Py_BUILD_CORE
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace torch_xla_donate {

namespace {

#if PY_VERSION_HEX < 0x030D0000
// Adds a variable, unless it is unbound.
bool Add(PyObject* found, PyObject* name, PyObject* value, bool is_in_cell) {
  if (is_in_cell && value != nullptr && PyCell_Check(value)) {
    value = PyCell_GET(value);
  }
  return value == nullptr || PyDict_SetItem(found, name, value) == 0;
}
#endif

#if PY_VERSION_HEX < 0x030B0000

bool AddAll(PyFrameObject* frame, PyCodeObject* code, PyObject* found) {
  PyObject** value = frame->f_localsplus;
  for (PyObject* names : {code->co_varnames, code->co_cellvars, code->co_freevars}) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      if (!Add(found, PyTuple_GET_ITEM(names, i), *value++, /*is_in_cell=*/names != code->co_varnames)) {
        return false;
      }
    }
  }
  return true;
}

#elif PY_VERSION_HEX < 0x030D0000

bool AddAll(PyFrameObject* frame, PyCodeObject* code, PyObject* found) {
  for (int i = 0; i < code->co_nlocalsplus; ++i) {
    const bool is_in_cell = (_PyLocals_GetKind(code->co_localspluskinds, i) & (CO_FAST_CELL | CO_FAST_FREE)) != 0;
    if (!Add(found, PyTuple_GET_ITEM(code->co_localsplusnames, i), frame->f_frame->localsplus[i], is_in_cell)) {
      return false;
    }
  }
  return true;
}

#else

bool AddAll(PyFrameObject* frame, PyCodeObject*, PyObject* found) {
  PyObject* view = PyFrame_GetLocals(frame);
  const bool added = view != nullptr && PyDict_Update(found, view) == 0;
  Py_XDECREF(view);
  return added;
}

#endif

// The namespace of a module or a class body. `f_locals` would call methods of a class body's own kind of dictionary.
PyObject* CopyOfNamespace(PyFrameObject* frame) {
#if PY_VERSION_HEX < 0x030B0000
  PyObject* space = frame->f_locals;
  Py_XINCREF(space);
#elif PY_VERSION_HEX < 0x030D0000
  PyObject* space = frame->f_frame->f_locals;
  Py_XINCREF(space);
#else
  PyObject* space = PyFrame_GetLocals(frame);
  if (space == nullptr) {
    return nullptr;
  }
#endif
  PyObject* copy = space != nullptr && PyDict_Check(space) ? PyDict_Copy(space) : PyDict_New();
  Py_XDECREF(space);
  return copy;
}

}  // namespace

PyObject* FrameVariables(PyFrameObject* frame) {
  PyCodeObject* code = PyFrame_GetCode(frame);
  const bool optimized = (code->co_flags & CO_OPTIMIZED) != 0;
  PyObject* found = optimized ? PyDict_New() : CopyOfNamespace(frame);
  if (optimized && found != nullptr && !AddAll(frame, code, found)) {
    Py_CLEAR(found);
  }
  Py_DECREF(code);
  return found;
}

}  // namespace torch_xla_donate
