// Arrays without memory. torch_xla would end the process if it read one.
//
// Threads: any. Errors: ThrowIfPlaceholder() throws std::runtime_error.
#pragma once

#include "host/symbols.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

void NotePlaceholder(const lazy::BackendDataPtr& array);
// Called where the program uses an array, because pending values survive an error there, and not in the step.
void ThrowIfPlaceholder(const lazy::BackendData* array);

}  // namespace torch_xla_donate
