// What torch_xla leaves out of a graph's hash: which node feeds which.
//
// torch_xla 2.7 to 2.9 hash each output by its structure and the numbers of the parameters in post-order. A node that
// two outputs share stands in the post-order once, so two graphs that connect it differently can have one hash. The
// second then runs the first one's executable (pytorch/xla#8353).
//
// Threads: any. Errors: none of its own.
#pragma once

#include <torch/csrc/lazy/core/ir.h>

#include <vector>

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// Hashes, for each node in post-order, the numbers of its operands, and at the end the numbers of the roots.
// Linear in nodes and operands.
lazy::hash_t HashWiring(const std::vector<const lazy::Node*>& post_order, const std::vector<lazy::Value>& roots);

}  // namespace torch_xla_donate
