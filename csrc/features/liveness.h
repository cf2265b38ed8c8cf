// Which inputs of a step the program can still reach once the graph has run.
//
// At a step barrier the executor lists every live tensor of the device, and each pending graph belongs to one of them.
// So a parameter that no live tensor holds, by its data or by a graph that the step leaves pending, is out of reach.
// Reference counts of buffers do not help: what earlier runs still hold flips with their timing, and each flip would be
// another graph.
//
// Ownership: belongs to one step. Threads: belongs to one thread. Errors: none of its own.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <unordered_set>
#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

class Liveness {
 public:
  explicit Liveness(const std::vector<lazy::BackendDataPtr>& parameters);

  // Somebody holds the buffer, whichever it is.
  void Hold(const lazy::BackendData* buffer);
  // Somebody may still run the graph, and read what it reads.
  void HoldGraph(const lazy::Value& root);
  // By position of the parameter: what Hold() was called with, and what only a graph reads.
  const std::vector<bool>& Held() const { return held_; }
  const std::vector<bool>& Read() const { return read_; }

 private:
  ska::flat_hash_map<const lazy::BackendData*, std::size_t> position_of_;
  std::vector<bool> held_, read_;
  std::unordered_set<const lazy::Node*> seen_;
};

}  // namespace torch_xla_donate
