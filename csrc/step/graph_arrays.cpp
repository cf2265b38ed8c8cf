// Reads sizes from the host's texts, and searches from an output's root towards the parameters.
#include "step/graph_arrays.h"

#include <torch/csrc/lazy/backend/backend_interface.h>

#include <atomic>
#include <cstdlib>
#include <queue>
#include <set>
#include <string_view>
#include <utility>

#include "host/address_numbers.h"
#include "host/array_text.h"
#include "host/graphs.h"

namespace torch_xla_donate {

namespace {

// The number of nodes searched from an output's root. Updates are short graphs, and XLA could not overwrite a more
// distant parameter early anyway.
constexpr std::size_t kNodesPerOutput = 64;

thread_local std::optional<SizeRule> forced_rule;
std::atomic<bool> keep_order{false};

// torch_xla has set PJRT_DEVICE before the first step, and takes no other platform after it.
// NOLINTBEGIN(concurrency-mt-unsafe): torch_xla and XLA read the environment in the same way
SizeRule RuleOfPlatform() {
  static const SizeRule rule = [] {
    const char* platform = std::getenv("PJRT_DEVICE");
    if (platform == nullptr || std::string_view(platform) != "TPU") {
      return SizeRule::kBytes;
    }
    const char* type = std::getenv("TPU_ACCELERATOR_TYPE");
    const std::string_view generation = std::string_view(type == nullptr ? "" : type).substr(0, 3);
    return generation == "v2-" || generation == "v3-" ? SizeRule::kTilesBeforeV4 : SizeRule::kTiles;
  }();
  return rule;
}
// NOLINTEND(concurrency-mt-unsafe)

}  // namespace

ArraySize SizeOf(const std::string& array, bool unsharded) {
  return MemoryPerDevice(unsharded ? WithoutLayout(array) : array, forced_rule.value_or(RuleOfPlatform()));
}

void ForceSizeRule(std::optional<SizeRule> rule) { forced_rule = rule; }

void SetKeepOrder(bool on) { keep_order.store(on, std::memory_order_relaxed); }
bool KeepsOrder() { return keep_order.load(std::memory_order_relaxed); }

GraphArrays MeasureArrays(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots,
                          bool sharded) {
  GraphArrays found;
  for (const lazy::BackendDataPtr& parameter : parameters) {
    found.arrays.push_back(abi::DescribeBuffer(*parameter));
    found.bytes.push_back(SizeOf(found.arrays.back(), sharded));
  }
  for (const lazy::Value& root : roots) {
    const std::string array = abi::DescribeNode(root);
    const bool dynamic = IsDynamic(array);
    found.dynamic = found.dynamic || dynamic;
    found.output_bytes.push_back(SizeOf(array, sharded));
    found.movable.push_back(ElementType(array).has_value() && !dynamic);
  }
  return found;
}

FindNear NearParameters(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots) {
  // The first call fills `position_of`.
  return [&parameters, &roots, position_of = std::optional<AddressNumbers>()](std::size_t output) mutable {
    if (!position_of.has_value()) {
      position_of.emplace(parameters.size());
      for (const lazy::BackendDataPtr& parameter : parameters) {
        position_of->Add(parameter.get());
      }
    }
    std::vector<NearParameter> result;
    std::queue<std::pair<const lazy::Node*, std::size_t>> open;
    std::set<const lazy::Node*> seen;
    const auto add = [&](const lazy::Node* node, std::size_t distance) {
      if (node != nullptr && seen.size() < kNodesPerOutput && seen.insert(node).second) {
        open.emplace(node, distance);
      }
    };
    add(roots[output].node.get(), 0);
    for (; !open.empty(); open.pop()) {
      const auto [node, distance] = open.front();
      if (const auto data = lazy::getBackend()->GetComputationDataFromNode(node); data != nullptr) {
        if (const std::size_t i = position_of->Of(data.get()); i != AddressNumbers::kUnknown) {
          result.push_back({distance, i});
        }
        continue;
      }
      for (const lazy::Output& operand : node->operands()) {
        add(operand.node, distance + 1);
      }
    }
    return result;
  };
}

}  // namespace torch_xla_donate
