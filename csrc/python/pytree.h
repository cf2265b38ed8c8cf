// Trees of builtin containers: leaves, structure, and the key of a compiled graph.
//
// The caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace torch_xla_donate {

namespace py = pybind11;

// Leaves and tokens of a tree; None if anything in it is not a builtin container or leaf, or if it is nested deeply.
// exact: makes the token of the keys of a dict, if other keys may equal them; None to put the keys themselves.
py::object Flatten(py::handle tree, const py::object& exact);
// The inverse of Flatten() without `exact`, with other leaves.
py::object Unflatten(const py::list& leaves, const py::tuple& tokens);

// The inputs of a compiled graph: sizes, dtype, device and requires_grad of tensors, and which share a buffer.
struct Signature {
  py::bytes key;
  std::vector<int> devices;  // as DevicesOf()
  bool pending = false;      // a tensor has no value yet
  bool dynamic = false;      // only the device knows the size of a tensor, so no graph is compiled
  py::list others;           // the leaves that are not tensors
};
Signature SignatureOf(const py::list& leaves);

// The indices of the XLA devices of the tensors among the leaves, each once.
std::vector<int> DevicesOf(const py::list& leaves);

}  // namespace torch_xla_donate
