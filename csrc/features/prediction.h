// What the next step would do with the marks that there are, as far as it can be told before the compilation.
//
// The outputs are the live tensors with pending work. Their sizes are known, their shardings only where somebody has
// given one: the compiler chooses the others. Two rules fill in more (measured on 2.9.0, test/test_spmd.py): where
// nothing in the graph is sharded, nothing will be; and the only output of a step stays whole on each device if its
// sharding does not divide it evenly.
//
// Threads: reads tensors that other threads must not use
//   meanwhile, as a step does. Errors: passes on what the callback throws.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// What the next step would compute, and the donors that it would offer to XLA.
struct StepForecast {
  struct Input {
    std::uintptr_t buffer;  // as in identity
    std::optional<std::int64_t> bytes_per_device;
  };
  std::vector<Input> inputs;  // donors, those of torch_xla among them, and marks that would be refused; in step order
  std::vector<std::string> outputs;           // arrays, with " sharding=" where shardings matter and this one is known
  std::unordered_set<std::uintptr_t> shared;  // marked buffers that an unmarked live tensor holds
  bool complete = true;                       // false if some pending work cannot be seen
};

// The sharding of a tensor with pending work as XLA writes it; empty if the program has given it none.
using ShardingOf = std::function<std::string(const std::shared_ptr<abi::TensorData>&)>;

// Looks at these live tensors, listed in the executor's order. Without a callback there are no shardings.
StepForecast ForecastStep(const std::vector<std::shared_ptr<abi::TensorData>>& live, const ShardingOf& sharding_of);

}  // namespace torch_xla_donate
