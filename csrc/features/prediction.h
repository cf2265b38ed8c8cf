// Predicts before the compilation what the next step will do with the pending marks.
//
// The outputs are the live tensors with pending work. Their sizes are known, but only annotated shardings: the compiler
// chooses the others. Two rules fill in more (measured on 2.9.0, test/process/test_spmd.py). If nothing in the graph is
// sharded, no output is. The only output of a step is replicated if its sharding does not divide it evenly.
//
// Threads: reads tensors that other threads must not use meanwhile, as a step does.
// Errors: passes on the callback's exceptions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "host/symbols.h"
#include "step/size_pairing.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// The outputs of the next step, and the donors that it would offer to XLA.
struct StepForecast {
  struct Input {
    std::uintptr_t buffer;  // as in identity
    ArraySize size;         // on a device, as XLA compares it
  };
  std::vector<Input> inputs;         // donors, torch_xla's included, and marks that would be refused; in step order
  std::vector<std::string> outputs;  // arrays, with " sharding=" if known and relevant
  std::unordered_set<std::uintptr_t> shared;  // marked buffers that an unmarked live tensor holds
  bool complete = true;                       // false if some pending work is hidden
};

// Returns the sharding of a tensor with pending work as XLA writes it; empty if the program has not annotated it.
using ShardingOf = std::function<std::string(const std::shared_ptr<abi::TensorData>&)>;

// Reads these live tensors, in the executor's order. Without a callback it assumes no shardings.
StepForecast ForecastStep(const std::vector<std::shared_ptr<abi::TensorData>>& live, const ShardingOf& sharding_of);

}  // namespace torch_xla_donate
