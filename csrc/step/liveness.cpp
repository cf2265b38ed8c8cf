// Looks parameters up by buffer, and walks pending graphs.
#include "step/liveness.h"

#include <torch/csrc/lazy/backend/backend_interface.h>

namespace torch_xla_donate {

Liveness::Liveness(const std::vector<lazy::BackendDataPtr>& parameters)
    : position_of_(std::make_unique<ska::flat_hash_map<const lazy::BackendData*, std::size_t>>()),
      held_(parameters.size(), false),
      read_(parameters.size(), false) {
  position_of_->reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    position_of_->emplace(parameters[i].get(), i);
  }
}

void Liveness::Hold(const lazy::BackendData* buffer) {
  if (const auto found = position_of_->find(buffer); found != position_of_->end()) {
    held_[found->second] = true;
  }
}

void Liveness::HoldGraph(const lazy::Value& root) {
  std::vector<const lazy::Node*> open = {root.node.get()};
  while (!open.empty()) {
    const lazy::Node* node = open.back();
    open.pop_back();
    if (node == nullptr || !seen_.insert(node).second) {
      continue;
    }
    const lazy::BackendDataPtr data = lazy::getBackend()->GetComputationDataFromNode(node);
    if (const auto found = position_of_->find(data.get()); found != position_of_->end()) {
      read_[found->second] = true;
    }
    for (const lazy::Output& operand : node->operands()) {
      open.push_back(operand.node);
    }
  }
}

}  // namespace torch_xla_donate
