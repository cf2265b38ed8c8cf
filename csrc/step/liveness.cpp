// Looks parameters up by buffer, and walks pending graphs.
#include "step/liveness.h"

#include <torch/csrc/lazy/backend/backend_interface.h>

namespace torch_xla_donate {

Liveness::Liveness(const std::vector<lazy::BackendDataPtr>& parameters)
    : position_of_(parameters.size()), held_(parameters.size(), false), read_(parameters.size(), false) {
  for (const lazy::BackendDataPtr& parameter : parameters) {
    position_of_.Add(parameter.get());
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
    if (const std::size_t i = position_of_.Of(data.get()); i != AddressNumbers::kUnknown) {
      read_[i] = true;
    }
    for (const lazy::Output& operand : node->operands()) {
      open.push_back(operand.node);
    }
  }
}

}  // namespace torch_xla_donate
