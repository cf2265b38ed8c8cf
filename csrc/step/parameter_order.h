// The order of a graph's parameters and outputs, which decides which donor goes to which output (see donor_pairs.h).
//
// torch_xla orders outputs by the age of their tensors, and parameters by the graph's traversal. Any order of
// parameters will do, as they depend on nothing.
//
// Threads: works on a step's own data. Errors: none; a graph that is not as expected is left as it is.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// Makes the parameters at these positions the first of the graph, in this order; the others follow as they were.
// A graph in another order is another program, so the order goes into the collection's hash. Returns whether the order
// has changed. Linear in the nodes of the graph.
bool PutFirst(const std::vector<std::size_t>& positions, abi::Executor::PostOrderData& graph,
              abi::Executor::SyncTensorCollection& collection);

// Puts the outputs into another order: order[k] is the one that becomes the k-th. `outputs` are the tensors that wait
// for the results, in the old order. torch_xla has made an array for each place already, so those that move get new
// ones, which are returned; ReleaseOutputs() takes them back. Nothing changes, and nothing is returned, if the order is
// empty or an array cannot be made.
using MovedOutputs = std::vector<std::shared_ptr<abi::TensorData>>;
MovedOutputs MoveOutputs(const std::vector<std::size_t>& order, const std::vector<lazy::Value>& roots,
                         const std::vector<std::shared_ptr<abi::TensorData>>& live,
                         abi::Executor::SyncTensorCollection& collection);
// The step will not run: its outputs are left as torch_xla leaves them.
void ReleaseOutputs(MovedOutputs& outputs);

}  // namespace torch_xla_donate
