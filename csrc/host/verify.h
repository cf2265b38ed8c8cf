// Checks of the layouts that this folder assumes.
//
// Threads: any. Errors: both throw std::runtime_error that names the first assumption which does not hold.
#pragma once

#include <cstdint>

#include "host/symbols.h"

namespace torch_xla_donate::abi {

// Compares a fresh, uploaded int32[3] probe and torch_xla's own id of it with the layouts of tensors and buffers. Must
// pass before anything else in this folder is used.
void VerifyLayouts(const at::Tensor& probe, std::int64_t tensor_id);

// Compares the switches that the executor is known to have with where its layout expects them.
void VerifyExecutor(const lazy::LazyGraphExecutor& executor, bool eager_mode, bool allow_execution);

}  // namespace torch_xla_donate::abi
