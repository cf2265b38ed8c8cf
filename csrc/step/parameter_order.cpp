// Reorders the result of RunPostOrder: the nodes of parameters, the parameters, and their numbers.
#include "step/parameter_order.h"

#include <torch/csrc/lazy/backend/backend_interface.h>

#include <algorithm>
#include <string>

#include "host/array_text.h"
#include "host/graphs.h"
#include "host/tensors.h"

namespace torch_xla_donate {

namespace {

// Salts, so that an order and the equal list of donors that the executor adds later have different hashes.
constexpr std::size_t kOrderSalt = 0x646f6e617465;
constexpr std::size_t kOutputSalt = 0x6f7574707574;

}  // namespace

bool PermuteParameters(const std::vector<std::size_t>& order, abi::Executor::PostOrderData& graph,
                       abi::Executor::SyncTensorCollection& collection) {
  if (std::is_sorted(order.begin(), order.end())) {
    return false;
  }
  const std::size_t count = graph.parameters_data.size();
  // new_number[i] is the new position of parameter i.
  std::vector<std::size_t> new_number(count);
  for (std::size_t place = 0; place < count; ++place) {
    new_number[order[place]] = place;
  }

  // The lowering numbers parameters in the order of their nodes. These are leaves, so they may all come first.
  struct Leaf {
    const lazy::Node* node;
    std::size_t parameter;
  };
  std::vector<Leaf> leaves;
  std::vector<const lazy::Node*> others;
  for (const lazy::Node* node : graph.post_order) {
    if (lazy::getBackend()->GetComputationDataFromNode(node) == nullptr) {
      others.push_back(node);
    } else if (leaves.size() < graph.parameter_sequence.size()) {
      leaves.push_back({node, new_number[graph.parameter_sequence[leaves.size()]]});
    } else {
      return false;
    }
  }
  if (leaves.size() != graph.parameter_sequence.size()) {
    return false;
  }
  std::stable_sort(leaves.begin(), leaves.end(),
                   [](const Leaf& left, const Leaf& right) { return left.parameter < right.parameter; });

  // Two programs may differ only in the node of each parameter, because two tensors may share a buffer. The executor
  // distinguishes them by the sequence it has found. So the hash gets that sequence before it is replaced.
  const lazy::hash_t programs = lazy::HashCombine(lazy::Hash(graph.parameter_sequence), lazy::Hash(new_number));
  std::vector<lazy::BackendDataPtr> parameters(count);
  // Both keep their sizes, so from here on nothing throws.
  collection.hash = lazy::HashCombine(collection.hash, lazy::HashCombine(lazy::MHash(kOrderSalt), programs));
  for (std::size_t i = 0; i < count; ++i) {
    parameters[new_number[i]] = std::move(graph.parameters_data[i]);
  }
  graph.parameters_data = std::move(parameters);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    graph.post_order[i] = leaves[i].node;
    graph.parameter_sequence[i] = leaves[i].parameter;
  }
  std::copy(others.begin(), others.end(), graph.post_order.begin() + static_cast<std::ptrdiff_t>(leaves.size()));
  return true;
}

std::optional<OutputMove> PrepareMove(const std::vector<std::size_t>& order, const std::vector<lazy::Value>& roots,
                                      const std::vector<std::shared_ptr<abi::TensorData>>& live,
                                      const abi::Executor::SyncTensorCollection& collection) {
  if (std::is_sorted(order.begin(), order.end()) || collection.indices.size() != roots.size()) {
    return std::nullopt;
  }
  OutputMove move;
  // torch_xla keeps the array of a tensor that has one already.
  for (std::size_t k = 0; k < order.size(); ++k) {
    move.roots.push_back(roots[order[k]]);
    move.indices.push_back(collection.indices[order[k]]);
    if (order[k] == k) {
      continue;
    }
    const std::string array = abi::DescribeNode(move.roots.back());
    const auto dtype = ElementType(array);
    if (!dtype.has_value()) {
      return std::nullopt;
    }
    const lazy::BackendDataPtr made =
        lazy::getBackend()->CreateDataPlaceholder(collection.device, lazy::Shape(*dtype, SizesOf(array)));
    if (WithoutLayout(abi::DescribeBuffer(*made)) != array) {
      return std::nullopt;
    }
    move.arrays.push_back(made);
    move.moved.push_back(live[move.indices.back()]);
  }
  move.hash = lazy::HashCombine(lazy::MHash(kOutputSalt), lazy::Hash(order));
  return move;
}

MovedOutputs Apply(OutputMove move, const std::vector<lazy::Value>& roots,
                   abi::Executor::SyncTensorCollection& collection) noexcept {
  // The executor's own vector, which it reads again after this hook: the caller is its only user.
  // NOLINTNEXTLINE(cppcoreguidelines-pro-type-const-cast)
  const_cast<std::vector<lazy::Value>&>(roots).swap(move.roots);
  collection.indices.swap(move.indices);
  collection.hash = lazy::HashCombine(collection.hash, move.hash);
  for (std::size_t i = 0; i < move.moved.size(); ++i) {
    abi::GiveArray(*move.moved[i], std::move(move.arrays[i]));
  }
  return std::move(move.moved);
}

void ReleaseOutputs(MovedOutputs& outputs) noexcept {
  for (const auto& output : outputs) {
    output->handle = nullptr;
  }
  outputs.clear();
}

}  // namespace torch_xla_donate
