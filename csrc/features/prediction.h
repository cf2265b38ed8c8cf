// What the next step would do with the marks that there are, as far as it can be told before the compilation.
//
// The outputs are the live tensors with pending work. Their sizes are known, their shardings only where somebody has
// given one: the compiler chooses the others. Two rules fill in more (measured on 2.9.0, test/test_spmd.py): where
// nothing in the graph is sharded, nothing will be; and the only output of a step stays whole on each device if its
// sharding does not divide it evenly.
//
// Ownership: holds buffers, for as long as the caller keeps it. Threads: reads tensors that other threads must not use
//   meanwhile, as a step does. Errors: passes on what the callback throws.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/torch_xla_abi.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

struct Outlook {
  struct Parameter {
    lazy::BackendDataPtr buffer;
    std::optional<std::size_t> own;  // the output that replaces it in place: torch_xla donates it
  };
  std::vector<Parameter> parameters;            // of the pending work, in the order of its graph
  std::vector<lazy::Value> roots;               // of the outputs
  std::vector<const abi::TensorData*> tensors;  // the same; valid as long as the caller's list
  std::vector<std::string> outputs;  // arrays, with " sharding=" where shardings matter and this one is known
  bool complete = true;              // false if there are tensors whose pending work cannot be seen
};

// The sharding of a tensor with pending work as XLA writes it; empty if nobody has given one.
using ShardingOf = std::function<std::string(const std::shared_ptr<abi::TensorData>&)>;

// Looks at these live tensors, listed in the executor's order. Without a callback there are no shardings.
Outlook LookAhead(const std::vector<std::shared_ptr<abi::TensorData>>& live, const ShardingOf& sharding_of);

}  // namespace torch_xla_donate
