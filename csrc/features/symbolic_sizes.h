// Whether the program has made a size that only the device knows. No live tensor shows its pending graph.
//
// `torch.nonzero(t).t().size(1)` on dynamic shapes (XLA_EXPERIMENTAL) is a SymInt with a graph that reads t. Without
// that setting torch_xla makes no such size.
//
// Threads: any. Errors: none.
#pragma once

#include "step/hooks.h"

namespace torch_xla_donate {

// The row of the table of hooks.
Hook SymbolicSizeHook();

// From the first such size on, the process donates nothing automatically.
bool HasSymbolicSizes() noexcept;

}  // namespace torch_xla_donate
