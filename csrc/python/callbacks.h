// What the hooks call of Python: the only place that takes the GIL for them, and that owns Python objects for them.
//
// Ownership: the objects given to SetCallbacks() are kept for the life of the process, as the hooks are.
// Errors: an exception of a callback is passed on as torch's own, which any host code carries.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "registry/registry.h"

namespace torch_xla_donate {

namespace py = pybind11;

// The names of a donor's leaves, joined: "weight, tied.weight". Needs the GIL. A name that cannot be had is left out;
// what ends the program is passed on.
std::string NamesOf(const Donor& donor);
// Where the donor was marked; empty for one that nobody has marked.
std::string WhereOf(const Donor& donor);

void SetCallbacks(py::object donated_buffer_error, py::object format_use, py::object report_reuse,
                  py::object step_ended, py::object prepare_auto, py::object set_collectives_token,
                  py::object auto_sharding);

// torch_xla's own pybind11 functions translate foreign C++ exceptions by this list, which all modules share.
void RegisterExceptions();

}  // namespace torch_xla_donate
