// Tensors as Python has them: which objects are tensors, and what torch_xla's wrapper holds.
//
// Threads: the caller holds the GIL.
#pragma once

#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

namespace torch_xla_donate::abi {

// By the type alone: isinstance() asks an object's `__class__`, which may lie, or run code of the program.
inline bool IsTensor(PyObject* object) {
  PyTypeObject* const kind = Py_TYPE(object);
  return THPVariable_CheckTypeExact(kind) ||
         PyType_IsSubtype(kind, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// WithoutWrapper() of a tensor that is of a class of its own.
[[gnu::noinline]] inline PyObject* WithoutOwnWrapper(PyObject* tensor) {
  PyTypeObject* const kind = Py_TYPE(tensor);
  static PyObject* const name = PyUnicode_InternFromString("global_tensor");
  PyObject* const slot = _PyType_Lookup(kind, name);
  if (slot == nullptr || Py_TYPE(slot) != &PyMemberDescr_Type) {
    return tensor;
  }
  PyObject* const inner = Py_TYPE(slot)->tp_descr_get(slot, tensor, nullptr);
  if (inner == nullptr) {
    PyErr_Clear();  // an empty slot
    return tensor;
  }
  Py_DECREF(inner);  // the slot keeps it
  return IsTensor(inner) ? inner : tensor;
}

// The tensor that an XLAShardedTensor of torch_xla wraps; any other tensor as it is. The wrapper keeps it in a slot, so
// this runs no Python.
inline PyObject* WithoutWrapper(PyObject* tensor) {
  return THPVariable_CheckTypeExact(Py_TYPE(tensor)) ? tensor : WithoutOwnWrapper(tensor);
}

}  // namespace torch_xla_donate::abi
