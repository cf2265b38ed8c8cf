// Arrays without memory. torch_xla would read memory that does not exist if a run got one.
//
// Threads: any. Errors: a run that reads a placeholder throws std::runtime_error before it begins.
#pragma once

#include "host/symbols.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

void NotePlaceholder(const lazy::BackendDataPtr& array);

}  // namespace torch_xla_donate
