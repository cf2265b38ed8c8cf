// The order of a graph's parameters, which decides which donor goes to which output.
//
// XLA gives a donor to an output of the same bytes on each device, and pairs those of equal bytes in their order: the
// first donor goes to the first output, the second to the second (measured on 2.9.0, test/test_into.py). The order of
// the outputs is the executor's: that in which their tensors were made. The order of the parameters is that of the
// graph's traversal, but any order will do, as parameters depend on nothing. So a wish for a pair is a wish for an
// order.
//
// Threads: works on a step's own data. Errors: none; a graph that is not as expected is left as it is.
#pragma once

#include <cstddef>
#include <vector>

#include "torch_xla_abi.h"

namespace torch_xla_donate {

// Makes the parameters at these positions the first of the graph, in this order; the others follow as they were.
// A graph in another order is another program, so the order goes into the collection's hash. Returns whether the order
// has changed. Linear in the nodes of the graph.
bool PutFirst(const std::vector<std::size_t>& positions, abi::Executor::PostOrderData& graph,
              abi::Executor::SyncTensorCollection& collection);

}  // namespace torch_xla_donate
