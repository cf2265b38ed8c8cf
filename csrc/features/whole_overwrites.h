// Operations that overwrite a whole tensor work on a consumed one, because they do not need its value.
//
// Functionalization turns an update in place into an operation that returns a new tensor, and then reports to torch_xla
// which tensor it replaces. Both steps look at the old tensor. The operation clones it for its shape, although it drops
// the values. torch_xla checks whether it holds data, to find the input that an output may replace. libtorch makes
// these calls through its own relocation slots, where the hooks are.
//
// Threads: any thread may call all functions.
#pragma once

#include <vector>

#include "step/hooks.h"

namespace torch_xla_donate {

// Rows of the table of hooks. Throws std::runtime_error if libtorch does not export one of the functions.
std::vector<Hook> OverwriteHooks();

// Whether torch_xla looks at a tensor of this thread only to find what another one replaces.
bool IsReplacing();

}  // namespace torch_xla_donate
