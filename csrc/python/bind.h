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

inline const at::Tensor& TensorOf(py::handle object) {
  if (!IsTensor(object.ptr())) {
    throw py::type_error(std::string("expected a torch.Tensor, got ") + Py_TYPE(object.ptr())->tp_name);
  }
  return THPVariable_Unpack(object.ptr());
}

}  // namespace torch_xla_donate
