// Sizes that only the device knows: their pending graphs, which no live tensor shows.
//
// `torch.nonzero(t).t().size(1)` on dynamic shapes (XLA_EXPERIMENTAL) is a SymInt with a graph that reads t. All
// symbolic sizes are computed from nodes that torch_xla makes for a dimension of a tensor, and hold these nodes. The
// hook notes each such node when torch_xla wraps it into a SymInt.
//
// Ownership: nodes are noted weakly. Threads: any. Errors: the hook and SymbolicSizes() throw none themselves.
#pragma once

#include <vector>

#include "host/symbols.h"
#include "registry/reasons.h"
#include "step/hooks.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// The row of the table of hooks.
Hook SymbolicSizeHook();

// The nodes of all sizes that the program can still ask for.
std::vector<lazy::NodePtr> SymbolicSizes();

// Why SymbolicSizes() may lack nodes; empty if it has all of them.
Reason SymbolicSizesObstacle();

}  // namespace torch_xla_donate
