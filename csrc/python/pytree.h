// Trees of builtin containers: leaves and structure, and what a graph is compiled for.
//
// The caller holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_xla_donate {

namespace py = pybind11;

// Leaves and tokens of a tree; None if anything in it is no builtin container or leaf.
py::object Flatten(py::handle tree);
// The inverse, with other leaves.
py::object Unflatten(const py::list& leaves, const py::tuple& tokens);

// What a graph is compiled for, of its inputs: of the tensors sizes, dtype, device, whether a gradient is wanted, and
// which of them share a buffer.
struct Signature {
  py::bytes key;
  bool pending = false;  // one of them has no value yet
  bool dynamic = false;  // one of them has a size that only the device knows: no graph is compiled for it
  py::list others;       // what is not a tensor
};
Signature SignatureOf(const py::list& leaves);

}  // namespace torch_xla_donate
