// The Python functions that the hooks call. Only this file runs Python code for the hooks.
//
// Ownership: the objects given to SetCallbacks() are never freed, because hooks may always use them.
// Errors: passes on a callback's exception as torch's own, which any host code carries.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "registry/donor.h"

namespace torch_xla_donate {

namespace py = pybind11;

// The names of a donor's leaves, joined: "weight, tied.weight". Needs the GIL. Omits a name whose lookup raises an
// Exception; passes on others, such as KeyboardInterrupt.
std::string NamesOf(const DonorSnapshot& donor);
// The place that marked the donor; empty for an unmarked one.
std::string WhereOf(const DonorSnapshot& donor);

void SetCallbacks(py::object error, py::object format, py::object reuse, py::object ended, py::object prepare,
                  py::object set_token, py::object is_auto_sharding, py::object is_eager);

// The function that records the logged runs.
void SetRunRecorder(py::object record);

// torch_xla's own pybind11 functions use this list of translators, too, because all modules share it.
void RegisterExceptions();

}  // namespace torch_xla_donate
