// The parts of the module, one for each file bind_*.cpp.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

namespace torch_xla_donate {

namespace py = pybind11;
using namespace py::literals;  // "name"_a

void BindHooks(py::module_& m);
void BindMarks(py::module_& m);
void BindRuns(py::module_& m);
void BindReport(py::module_& m);
void BindSwitches(py::module_& m);
void BindAuto(py::module_& m);
void BindTesting(py::module_& m);

// By the type alone: isinstance() asks an object's `__class__`, which may lie, or run code of the program.
inline bool IsTensor(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// The tensor that an XLAShardedTensor of torch_xla wraps; any other tensor as it is. The wrapper keeps it in a slot, so
// this runs no Python.
inline PyObject* WithoutWrapper(PyObject* tensor) {
  PyTypeObject* const kind = Py_TYPE(tensor);
  if (THPVariable_CheckTypeExact(kind)) {
    return tensor;
  }
  static PyObject* const name = PyUnicode_InternFromString("global_tensor");
  PyObject* const slot = _PyType_Lookup(kind, name);
  if (slot == nullptr || Py_TYPE(slot) != &PyMemberDescr_Type) {
    return tensor;
  }
  const auto inner = py::reinterpret_steal<py::object>(Py_TYPE(slot)->tp_descr_get(slot, tensor, nullptr));
  if (!inner) {
    PyErr_Clear();  // an empty slot
  }
  return inner && IsTensor(inner.ptr()) ? inner.ptr() : tensor;
}

// For an object of which IsTensor() is true.
inline const at::Tensor& TensorIn(PyObject* tensor) { return THPVariable_Unpack(WithoutWrapper(tensor)); }

inline const at::Tensor& TensorOf(py::handle object) {
  if (!IsTensor(object.ptr())) {
    throw py::type_error(std::string("expected a torch.Tensor, got ") + Py_TYPE(object.ptr())->tp_name);
  }
  return TensorIn(object.ptr());
}

}  // namespace torch_xla_donate
