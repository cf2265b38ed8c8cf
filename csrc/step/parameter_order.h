// The order of a graph's parameters and outputs, which decides which output takes which donor (see size_pairing.h).
//
// torch_xla orders outputs by the age of their tensors, and parameters by the traversal of the graph. Parameters depend
// on nothing, so any order of them is valid.
//
// Threads: works on a step's own data. Errors: only std::bad_alloc, which leaves everything unchanged, as does an
//   unexpected graph.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

// Gives the parameters of a graph a new order, a permutation of all: order[k] becomes the k-th. A graph in another
// order is another program, so the collection's hash includes the order. Returns whether a parameter has moved. Linear
// in the nodes of the graph.
bool PermuteParameters(const std::vector<std::size_t>& order, abi::Executor::PostOrderData& graph,
                       abi::Executor::SyncTensorCollection& collection);

// A new order of the outputs, a permutation of all: order[k] becomes the k-th. torch_xla has already made an array for
// each place, so a moved output gets a new one.
using MovedOutputs = std::vector<std::shared_ptr<abi::TensorData>>;
struct OutputMove {
  std::vector<lazy::Value> roots;
  std::vector<std::size_t> indices;
  MovedOutputs moved;
  std::vector<lazy::BackendDataPtr> arrays;  // of the moved outputs
  lazy::hash_t hash;
};
// `live` are the live tensors, in the executor's order. Returns nullopt if no output moves or an array cannot be made.
std::optional<OutputMove> PrepareMove(const std::vector<std::size_t>& order, const std::vector<lazy::Value>& roots,
                                      const std::vector<std::shared_ptr<abi::TensorData>>& live,
                                      const abi::Executor::SyncTensorCollection& collection);
// Returns the moved outputs, for ReleaseOutputs().
MovedOutputs Apply(OutputMove move, const std::vector<lazy::Value>& roots,
                   abi::Executor::SyncTensorCollection& collection) noexcept;
// For a step that will not run: releases the arrays of the moved outputs.
void ReleaseOutputs(MovedOutputs& outputs) noexcept;

}  // namespace torch_xla_donate
