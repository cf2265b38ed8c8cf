// Walks the pending work of the live tensors.
#include "features/prediction.h"

#include <torch/csrc/lazy/backend/backend_interface.h>
#include <torch/csrc/lazy/core/ir_util.h>

#include <algorithm>
#include <iterator>
#include <unordered_map>
#include <utility>

#include "features/switches.h"
#include "host/array_text.h"
#include "host/graphs.h"
#include "host/tensors.h"
#include "registry/registry.h"
#include "step/graph_arrays.h"
#include "step/size_pairing.h"

namespace torch_xla_donate {

namespace {

constexpr const char* kReplicated = " sharding={replicated}";

bool IsReplicated(const lazy::BackendData& buffer) {
  const std::string array = abi::DescribeBuffer(buffer);
  return !IsSharded(array) || array.find(kReplicated) != std::string::npos;
}

// The pending work of the live tensors.
struct PendingGraph {
  struct Parameter {
    lazy::BackendDataPtr buffer;
    std::optional<std::size_t> own;  // the output that replaces it in place, so that torch_xla donates it
  };
  std::vector<Parameter> parameters;            // in the order of the graph
  std::vector<lazy::Value> roots;               // of the outputs
  std::vector<const abi::TensorData*> tensors;  // the same
  std::vector<std::string> outputs;
  bool complete = true;
};

PendingGraph FindPendingGraph(const std::vector<std::shared_ptr<abi::TensorData>>& live,
                              const ShardingOf& sharding_of) {
  PendingGraph graph;
  std::vector<const lazy::Node*> roots;
  abi::OutputIds ids;
  for (const std::shared_ptr<abi::TensorData>& tensor : live) {
    if (tensor == nullptr) {
      continue;
    }
    if (abi::HasView(*tensor)) {
      graph.complete = false;
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
    graph.outputs.push_back(std::move(*array));
    roots.push_back(tensor->ir_value.node.get());
    graph.roots.push_back(tensor->ir_value);
    graph.tensors.push_back(tensor.get());
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
      graph.parameters.push_back({buffer, ids.ReplacementOf(*buffer)});
    }
  }

  if (sharding_of) {
    for (std::string& output : graph.outputs) {
      const bool alone = graph.outputs.size() == 1;
      if (!IsSharded(output) ? !sharded : alone && !IsEven(output)) {
        output = WithoutLayout(output) + kReplicated;
      }
    }
  }
  return graph;
}

}  // namespace

StepForecast ForecastStep(const std::vector<std::shared_ptr<abi::TensorData>>& live, const ShardingOf& sharding_of) {
  PendingGraph graph = FindPendingGraph(live, sharding_of);
  std::unordered_map<const lazy::BackendData*, DonorSnapshot> marked;
  for (DonorSnapshot& donor : DonationRegistry::Get().Pending()) {
    if (!donor.IsForCompiledRun()) {
      marked.emplace(donor.buffer.lock().get(), std::move(donor));
    }
  }
  StepForecast forecast;
  for (const std::shared_ptr<abi::TensorData>& tensor : live) {
    const auto found = tensor == nullptr ? marked.end() : marked.find(tensor->handle.get());
    if (found != marked.end() && !found->second.IsMarkedBy(tensor.get())) {
      forecast.shared.insert(reinterpret_cast<std::uintptr_t>(found->first));
    }
  }
  const std::size_t count = graph.parameters.size();
  const auto size_of = [&](const std::string& array) { return SizeOf(array, /*unsharded=*/sharding_of != nullptr); };
  std::vector<lazy::BackendDataPtr> parameters;
  std::vector<std::string> arrays;
  std::vector<ArraySize> bytes, output_bytes;  // as a step compares them before it is compiled
  std::vector<bool> donors(count), listed(count);
  std::vector<std::optional<std::size_t>> wanted(count);
  std::transform(graph.outputs.begin(), graph.outputs.end(), std::back_inserter(output_bytes), size_of);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& [buffer, own] = graph.parameters[i];
    parameters.push_back(buffer);
    arrays.push_back(abi::DescribeBuffer(*buffer));
    bytes.push_back(size_of(arrays.back()));
    const auto found = marked.find(buffer.get());
    listed[i] = own.has_value() || found != marked.end();
    const bool is_fit =
        found != marked.end() && forecast.shared.count(reinterpret_cast<std::uintptr_t>(buffer.get())) == 0;
    donors[i] = own.has_value() || is_fit;
    wanted[i] = own;
    const auto target = is_fit ? found->second.Target() : nullptr;
    const auto output = std::find(graph.tensors.begin(), graph.tensors.end(), target.get());
    if (target != nullptr && output != graph.tensors.end()) {
      wanted[i] = static_cast<std::size_t>(output - graph.tensors.begin());
    }
  }
  const std::vector<bool> none(count, false), all(graph.roots.size(), true);
  const DonorPairs pairs = PairDonors({bytes, output_bytes, /*movable=*/all, donors, /*offered=*/none, wanted,
                                       NearParameters(parameters, graph.roots), KeepsOrder()});
  const auto list = [&](std::size_t i) {
    if (listed[i]) {
      listed[i] = false;
      forecast.inputs.push_back(
          {reinterpret_cast<std::uintptr_t>(parameters[i].get()), SizeOf(arrays[i], /*unsharded=*/false)});
    }
  };
  std::for_each(pairs.parameter_order.begin(), pairs.parameter_order.end(), list);
  for (std::size_t i = 0; i < count; ++i) {
    list(i);
  }
  forecast.outputs = std::move(graph.outputs);
  forecast.complete = graph.complete;
  return forecast;
}

}  // namespace torch_xla_donate
