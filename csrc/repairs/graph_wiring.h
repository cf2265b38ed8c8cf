// Adds to a graph's hash what torch_xla omits: which node feeds which.
//
// torch_xla 2.8 and 2.9 hash each output by its structure and the numbers of the parameters in post-order. A node that
// two outputs share is in the post-order once. So two graphs that connect it differently can have one hash, and the
// second then runs the executable of the first (pytorch/xla#8353).
//
// Threads: any. Errors: throws none itself.
#pragma once

#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

// Hashes the numbers of each node's operands, in post-order, then those of the roots. Linear in nodes and operands.
lazy::hash_t HashWiring(const std::vector<const lazy::Node*>& post_order, const std::vector<lazy::Value>& roots);

}  // namespace torch_xla_donate
