// The parts of the module, one for each file bind_*.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "host/python_tensors.h"

namespace torch_xla_donate {

namespace py = pybind11;
using namespace py::literals;  // "name"_a
using abi::IsTensor;

void BindHooks(py::module_& m);
void BindMarks(py::module_& m);
void BindRuns(py::module_& m);
void BindReport(py::module_& m);
void BindSwitches(py::module_& m);
void BindAuto(py::module_& m);
void BindTesting(py::module_& m);

// For an object of which IsTensor() is true.
inline const at::Tensor& TensorIn(PyObject* tensor) { return THPVariable_Unpack(abi::WithoutWrapper(tensor)); }

inline const at::Tensor& TensorOf(py::handle object) {
  if (!IsTensor(object.ptr())) {
    throw py::type_error(std::string("expected a torch.Tensor, got ") + Py_TYPE(object.ptr())->tp_name);
  }
  return TensorIn(object.ptr());
}

}  // namespace torch_xla_donate
