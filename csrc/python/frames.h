// The variables of Python's frames.
#pragma once

#include <Python.h>

namespace torch_xla_donate {

// A new dictionary of the local variables that a frame has at the moment. Before Python 3.13, `f_locals` of a
// function's frame brings the dictionary that the program may have from `locals()` up to date, and later may set
// variables back to its values. This reads the variables themselves, and calls no code of the program. A class body
// gives nothing if its namespace is another mapping.
//
// Returns a new reference. With the GIL. Errors: null, with Python's error set.
PyObject* FrameVariables(PyFrameObject* frame);

}  // namespace torch_xla_donate
