// The error at the line that uses a donated tensor.
//
// A step that claims a buffer takes the cached nodes and values of its tensors away, so that the next op has to pass
// CreateTensorNode and the next read CurrentDataHandle.
//
// Threads: any, with or without the GIL. Errors: DonatedBufferAccess, and what the callbacks throw that may.
#pragma once

#include <torch/csrc/Exceptions.h>

#include "registry/registry.h"

namespace torch_xla_donate {

// Use of a donated buffer. Ops raise it as DonatedBufferError; pybind11 functions of torch_xla do by way of the
// translator that the Python module registers.
struct DonatedBufferAccess : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override;
};

// Throws DonatedBufferAccess if a step has consumed the buffer. Waits for the step where its outcome is not known yet.
void ThrowIfConsumed(const lazy::BackendData* buffer);

// Whether a step has consumed the buffer, or would have, had donation not been disabled. Does not wait.
bool IsGone(const lazy::BackendData* buffer);

// The program reads a buffer: throws or warns if it is gone.
void CheckRead(const lazy::BackendData* buffer);
// An operation uses the buffer of a tensor.
void CheckUse(const lazy::LazyTensor& tensor, const lazy::BackendData* buffer);

}  // namespace torch_xla_donate
