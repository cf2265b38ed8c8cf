// Operations that overwrite a tensor as a whole work on a consumed one: they do not need the value that is gone.
//
// Functionalization turns an update in place into an operation that gives a new tensor, and then tells torch_xla which
// tensor that replaces. Both look at the old tensor. The operation clones it for its shape, although it throws the
// values away; torch_xla asks whether it holds data, to find out what an output may take the place of. These calls
// inside libtorch go through its own relocation slots, and are hooked there.
//
// Threads: all functions may be called from any thread.
#pragma once

#include <vector>

#include "step/hooks.h"

namespace torch_xla_donate {

// Rows of the table of hooks. Throws std::runtime_error if libtorch does not export one of the functions.
std::vector<Hook> OverwriteHooks();

// Whether torch_xla looks at a tensor of this thread only to learn what another one replaces.
bool IsReplacing();

}  // namespace torch_xla_donate
