// Numbers the nodes of a graph and hashes its edges.
#include "repairs/graph_wiring.h"

#include <cstdint>

namespace torch_xla_donate {

namespace {

// The numbers of a graph's nodes. A step looks up each edge, so this is an open table, at most half full. It takes a
// third of the time of a general hash map.
constexpr std::size_t kAhead = 8;

class NodeNumbers {
 public:
  static constexpr std::uint32_t kUnknown = static_cast<std::uint32_t>(-1);

  explicit NodeNumbers(std::size_t nodes) {
    while ((std::size_t{1} << bits_) < 2 * nodes) {
      ++bits_;
    }
    slots_.resize(std::size_t{1} << bits_);
  }
  void Add(const lazy::Node* node) { slots_[Find(node)] = {node, count_++}; }
  std::uint32_t Of(const lazy::Node* node) const {
    const Slot& slot = slots_[Find(node)];
    return slot.node == nullptr ? kUnknown : slot.number;
  }

 private:
  struct Slot {
    const lazy::Node* node = nullptr;
    std::uint32_t number = 0;
  };
  // The slot of the node, or the empty slot for it.
  std::size_t Find(const lazy::Node* node) const {
    constexpr std::uint64_t kGoldenRatio = 0x9E3779B97F4A7C15;  // spreads addresses, which differ in few bits
    std::size_t place = (reinterpret_cast<std::uintptr_t>(node) * kGoldenRatio) >> (64 - bits_);
    while (slots_[place].node != nullptr && slots_[place].node != node) {
      place = (place + 1) & (slots_.size() - 1);
    }
    return place;
  }

  unsigned bits_ = 1;
  std::uint32_t count_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace

lazy::hash_t HashWiring(const std::vector<const lazy::Node*>& post_order, const std::vector<lazy::Value>& roots) {
  NodeNumbers numbers(post_order.size());
  std::vector<std::uint32_t> edges;
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
  return lazy::DataHash(edges.data(), edges.size() * sizeof(edges.front()));
}

}  // namespace torch_xla_donate
