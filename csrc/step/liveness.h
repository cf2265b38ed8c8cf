// Finds the inputs of a step that the program can still reach after the run.
//
// At a step barrier the executor lists every live tensor of the device. Each pending graph belongs to one of them or to
// the random seed, unless the program may make symbolic sizes (auto_donors.cpp). So the program can reach a parameter
// only if a live tensor holds it, or if a graph that stays pending reads it.
// Reference counts of buffers do not help, because earlier runs release buffers at varying times and each change would
// make another graph.
//
// Ownership: belongs to one step. Threads: belongs to one thread. Errors: throws none itself.
#pragma once

#include <unordered_set>
#include <vector>

#include "host/address_numbers.h"
#include "host/symbols.h"

namespace torch_xla_donate {

class Liveness {
 public:
  explicit Liveness(const std::vector<lazy::BackendDataPtr>& parameters);

  // Notes that the program holds the buffer, which may belong to no parameter.
  void Hold(const void* buffer) {
    if (const std::size_t i = position_of_.Of(buffer); i != AddressNumbers::kUnknown) {
      held_[i] = true;
    }
  }
  // Notes that the graph may still run and read its inputs.
  void HoldGraph(const lazy::Value& root);
  // By position of the parameter: those given to Hold(), and those that a graph of HoldGraph() reads.
  const std::vector<bool>& Held() const { return held_; }
  const std::vector<bool>& Read() const { return read_; }

 private:
  AddressNumbers position_of_;
  std::vector<bool> held_, read_;
  std::unordered_set<const lazy::Node*> seen_;
};

}  // namespace torch_xla_donate
