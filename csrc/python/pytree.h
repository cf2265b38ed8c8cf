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
py::tuple Signature(const py::list& leaves);

}  // namespace torch_xla_donate
