// Checks of the layouts that this folder assumes.
//
// Threads: any. Errors: both throw std::runtime_error that names the first wrong assumption.
#pragma once

#include <cstdint>

#include "host/symbols.h"

namespace torch_xla_donate::abi {

// Compares the layouts of tensors and buffers with a fresh, uploaded int32[3] probe and torch_xla's id of it. Must pass
// before any other function of this folder is used.
void VerifyLayouts(const at::Tensor& probe, std::int64_t tensor_id, bool is_sharded);

// Compares the executor's switches, whose values the caller knows, with the layout.
void VerifyExecutor(const lazy::LazyGraphExecutor& executor, bool eager_mode, bool allow_execution);

}  // namespace torch_xla_donate::abi
