// Walks the pending work of the live tensors.
#include "features/prediction.h"

#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/ir_util.h>

#include <unordered_set>

#include "host/array_text.h"

namespace torch_xla_donate {

namespace {

constexpr const char* kReplicated = " sharding={replicated}";

bool IsReplicated(const lazy::BackendData& buffer) {
  const std::string array = abi::DescribeBuffer(buffer);
  return !IsSharded(array) || array.find(kReplicated) != std::string::npos;
}

}  // namespace

Outlook LookAhead(const std::vector<std::shared_ptr<abi::TensorData>>& live, const ShardingOf& sharding_of) {
  Outlook outlook;
  std::vector<const lazy::Node*> roots;
  abi::OutputIds ids;
  for (const std::shared_ptr<abi::TensorData>& tensor : live) {
    if (tensor == nullptr) {
      continue;
    }
    if (abi::HasView(*tensor)) {
      outlook.complete = false;
      continue;
    }
    std::optional<std::string> array = abi::PendingArray(*tensor);
    if (!array) {
      continue;
    }
    if (sharding_of) {
      const std::string sharding = sharding_of(tensor);
      *array += sharding.empty() ? "" : " sharding=" + sharding;
    }
    outlook.outputs.push_back(std::move(*array));
    roots.push_back(tensor->ir_value.node.get());
    outlook.roots.push_back(tensor->ir_value);
    outlook.tensors.push_back(tensor.get());
    ids.Add(*tensor);
  }

  bool sharded = false;
  std::unordered_set<const lazy::BackendData*> seen;
  for (const lazy::Node* node : lazy::Util::ComputePostOrder(roots)) {
    const lazy::BackendDataPtr buffer = lazy::getBackend()->GetComputationDataFromNode(node);
    if (buffer == nullptr) {
      sharded = sharded || abi::IsAnnotated(*node);
    } else if (seen.insert(buffer.get()).second) {
      sharded = sharded || (sharding_of && !IsReplicated(*buffer));
      outlook.parameters.push_back({buffer, ids.ReplacementOf(*buffer)});
    }
  }

  if (sharding_of) {
    for (std::string& output : outlook.outputs) {
      const bool alone = outlook.outputs.size() == 1;
      if (!IsSharded(output) ? !sharded : alone && !IsEven(output)) {
        output = WithoutLayout(output) + kReplicated;
      }
    }
  }
  return outlook;
}

}  // namespace torch_xla_donate
