// The error at the line that uses a donated tensor.
//
// A step that claims a buffer removes the cached nodes and values of its tensors. So the next op passes
// CreateTensorNode, and the next read CurrentDataHandle.
//
// Threads: any, with or without the GIL. Errors: DonatedBufferAccess, and exceptions of the callbacks.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

// The use of a donated buffer. Ops raise it as DonatedBufferError. For pybind11 functions of torch_xla, a translator
// that the Python module registers does the same.
struct DonatedBufferAccess : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override;
};

// Throws DonatedBufferAccess if a step has consumed the buffer. Waits for the step if its outcome is not known yet.
void ThrowIfConsumed(const lazy::BackendData* buffer);

// Whether a step has consumed the buffer, or would have if donation were enabled. Does not wait.
bool IsGone(const lazy::BackendData* buffer);

// ThrowIfConsumed() for each buffer that a graph reads. A graph that belongs to no tensor, such as that of a symbolic
// size, passes no hook on tensors. Does nothing without the GIL: the thread may have locked the device, so it must not
// wait for it.
void ThrowIfReadsConsumed(const std::vector<lazy::Value>& roots);

// The program reads a buffer. Throws or warns if it is gone.
void CheckRead(const lazy::BackendData* buffer);
// An operation uses the buffer of a tensor.
void CheckUse(const lazy::LazyTensor& tensor, const lazy::BackendData* buffer);

}  // namespace torch_xla_donate
