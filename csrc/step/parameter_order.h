// The order of a graph's parameters and outputs, which decides which output takes which donor (see size_pairing.h).
//
// torch_xla orders outputs by the age of their tensors, and parameters by the traversal of the graph. Parameters depend
// on nothing, so any order of them is valid.
//
// Threads: works on a step's own data. Errors: throws none; leaves an unexpected graph unchanged.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// Moves the parameters at these positions to the front of the graph, in this order. The others follow in their old
// order. A graph in another order is another program, so the collection's hash includes the order. Linear in the nodes
// of the graph.
void PutFirst(const std::vector<std::size_t>& positions, abi::Executor::PostOrderData& graph,
              abi::Executor::SyncTensorCollection& collection);

// Reorders the outputs: order[k] becomes the k-th. `live` are the live tensors, in the executor's order. torch_xla has
// already made an array for each place, so a moved output gets a new one. Returns the moved outputs, for
// ReleaseOutputs(). Changes nothing, and returns nothing, if the order is empty or an array cannot be made.
using MovedOutputs = std::vector<std::shared_ptr<abi::TensorData>>;
MovedOutputs MoveOutputs(const std::vector<std::size_t>& order, const std::vector<lazy::Value>& roots,
                         const std::vector<std::shared_ptr<abi::TensorData>>& live,
                         abi::Executor::SyncTensorCollection& collection);
// For a step that will not run: releases the arrays of the moved outputs.
void ReleaseOutputs(MovedOutputs& outputs);

}  // namespace torch_xla_donate
