// Greedy matching by distance in the graph, then the orders that follow from it.
#include "step/donor_pairs.h"

#include <torch/csrc/lazy/backend/backend_interface.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <numeric>
#include <queue>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "host/array_text.h"

namespace torch_xla_donate {

namespace {

using Place = std::optional<std::size_t>;

// How far from an output's root a parameter is looked for, in nodes. Updates are short; what is farther away has no
// place where XLA could write over it early.
constexpr std::size_t kNodesPerOutput = 64;

struct Candidate {
  std::size_t distance, output, nearness, parameter;
  bool operator<(const Candidate& other) const {
    return std::tie(distance, output, nearness) < std::tie(other.distance, other.output, other.nearness);
  }
};

// The parameters near an output's root, nearest first: the output is most likely their next value.
void FindNear(const lazy::Value& root, std::size_t output,
              const std::unordered_map<const lazy::BackendData*, std::size_t>& position_of,
              std::vector<Candidate>& candidates) {
  std::queue<std::pair<const lazy::Node*, std::size_t>> open;
  std::set<const lazy::Node*> seen;
  const auto add = [&](const lazy::Node* node, std::size_t distance) {
    if (node != nullptr && seen.size() < kNodesPerOutput && seen.insert(node).second) {
      open.emplace(node, distance);
    }
  };
  add(root.node.get(), 0);
  for (std::size_t found = 0; !open.empty(); open.pop()) {
    const auto [node, distance] = open.front();
    if (const auto data = lazy::getBackend()->GetComputationDataFromNode(node); data != nullptr) {
      if (const auto position = position_of.find(data.get()); position != position_of.end()) {
        candidates.push_back({distance, output, found++, position->second});
      }
      continue;
    }
    for (const lazy::Output& operand : node->operands()) {
      add(operand.node, distance + 1);
    }
  }
}

// The donors and outputs of one size, as XLA pairs them.
struct SizeClass {
  std::vector<std::size_t> outputs;
  std::int64_t free = 0;            // outputs that no donor takes yet
  std::size_t donors = 0;           // how many
  std::deque<std::size_t> waiting;  // donors without an output
};

class Matching {
 public:
  explicit Matching(const PairRequest& request)
      : request_(request), donor_of_(request.roots.size()), output_of_(request.parameters.size()) {
    for (std::size_t output = 0; output < request.roots.size(); ++output) {
      if (const auto& bytes = request.output_bytes[output]) {
        classes_[*bytes].outputs.push_back(output);
        ++classes_[*bytes].free;
      }
    }
    pairs_.successor.resize(request.parameters.size());
    for (std::size_t i = 0; i < request.parameters.size(); ++i) {
      if (request.donors[i] && request.bytes[i].has_value()) {
        ++classes_[*request.bytes[i]].donors;
        --classes_[*request.bytes[i]].free;  // whichever it will be
      }
    }
  }

  DonorPairs Run() {
    for (std::size_t i = 0; i < request_.parameters.size(); ++i) {
      if (request_.donors[i] && request_.wanted[i].has_value()) {
        pairs_.successor[i] = request_.wanted[i];
        Pair(*request_.wanted[i], i);
      }
    }
    PairByFlow();
    PairTheRest();
    for (const auto& [bytes, group] : classes_) {
      if (group.free > 0) {
        pairs_.room.push_back(bytes);
      }
    }
    std::sort(pairs_.chosen.begin(), pairs_.chosen.end());
    MoveOutputs();
    OrderParameters();
    return std::move(pairs_);
  }

 private:
  bool IsTaken(std::size_t parameter) const { return output_of_[parameter].has_value(); }

  bool Pair(std::size_t output, std::size_t parameter) {
    const auto& bytes = request_.bytes[parameter];
    if (donor_of_[output].has_value() || IsTaken(parameter) || !bytes.has_value() ||
        request_.output_bytes[output] != bytes) {
      return false;
    }
    if (!request_.donors[parameter]) {
      SizeClass& group = classes_[*bytes];
      if (group.free <= 0) {
        return false;
      }
      --group.free;
      ++group.donors;
      pairs_.chosen.push_back(parameter);
    }
    donor_of_[output] = parameter;
    output_of_[parameter] = output;
    return true;
  }

  void PairByFlow() {
    std::unordered_map<const lazy::BackendData*, std::size_t> position_of;
    for (std::size_t i = 0; i < request_.parameters.size(); ++i) {
      if ((request_.donors[i] || request_.offered[i]) && !IsTaken(i)) {
        position_of.emplace(request_.parameters[i].get(), i);
      }
    }
    if (position_of.empty()) {
      return;
    }
    std::vector<Candidate> candidates;
    for (std::size_t output = 0; output < request_.roots.size(); ++output) {
      if (request_.output_bytes[output].has_value() && !donor_of_[output].has_value()) {
        FindNear(request_.roots[output], output, position_of, candidates);
      }
    }
    std::sort(candidates.begin(), candidates.end());
    for (const Candidate& found : candidates) {
      if (Pair(found.output, found.parameter)) {
        pairs_.successor[found.parameter] = found.output;
      }
    }
  }

  // What no output is computed from takes any output of its size, those in the donor set first.
  void PairTheRest() {
    for (const bool in_set : {true, false}) {
      for (std::size_t i = 0; i < request_.parameters.size(); ++i) {
        if ((in_set ? request_.donors[i] : request_.offered[i] && !request_.donors[i]) && !IsTaken(i) &&
            request_.bytes[i].has_value()) {
          classes_[*request_.bytes[i]].waiting.push_back(i);
        }
      }
    }
    for (std::size_t output = 0; output < request_.roots.size(); ++output) {
      if (!request_.output_bytes[output].has_value() || donor_of_[output].has_value()) {
        continue;
      }
      auto& waiting = classes_[*request_.output_bytes[output]].waiting;
      while (!waiting.empty() && !Pair(output, waiting.front())) {
        waiting.pop_front();  // it is offered, and no output of its size is left for it
      }
      if (!waiting.empty()) {
        waiting.pop_front();
      }
    }
  }

  // XLA gives donors to the first outputs of their size, so the outputs with a donor go before those without.
  void MoveOutputs() {
    std::vector<std::size_t> order(request_.roots.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    bool moved = false;
    for (const auto& [bytes, group] : classes_) {
      if (group.donors == 0 || group.donors >= group.outputs.size()) {
        continue;
      }
      std::vector<std::size_t> places;
      std::copy_if(group.outputs.begin(), group.outputs.end(), std::back_inserter(places),
                   [this](std::size_t output) { return request_.movable[output]; });
      std::vector<std::size_t> sorted = places;
      std::stable_partition(sorted.begin(), sorted.end(),
                            [this](std::size_t output) { return donor_of_[output].has_value(); });
      for (std::size_t k = 0; k < places.size(); ++k) {
        order[places[k]] = sorted[k];
        moved = moved || places[k] != sorted[k];
      }
    }
    if (moved) {
      pairs_.output_order = std::move(order);
    }
  }

  // The donor that XLA should give to each output, size by size, and whether it would without any change.
  void OrderParameters() {
    const auto& order = pairs_.output_order;
    std::vector<Place> donor_at(request_.roots.size());  // by new place of the output
    bool as_it_is = true;
    std::vector<bool> is_chosen(request_.parameters.size(), false);
    for (const std::size_t i : pairs_.chosen) {
      is_chosen[i] = true;
    }
    std::map<std::int64_t, std::vector<std::size_t>> donors_of;
    for (std::size_t i = 0; i < request_.parameters.size(); ++i) {
      if ((is_chosen[i] || request_.donors[i]) && request_.bytes[i].has_value()) {
        donors_of[*request_.bytes[i]].push_back(i);
      }
    }
    for (const auto& [bytes, donors] : donors_of) {
      const std::vector<std::size_t>& places = classes_[bytes].outputs;
      const std::size_t count = std::min(places.size(), donors.size());
      const auto wanted_at = [&](std::size_t k) { return donor_of_[order.empty() ? places[k] : order[places[k]]]; };
      // XLA will use the first `count` places. A donor whose output is behind them crosses: it fills a gap.
      std::vector<bool> placed(request_.parameters.size(), false);
      for (std::size_t k = 0; k < count; ++k) {
        if (const Place donor = wanted_at(k)) {
          placed[*donor] = true;
        }
      }
      auto spare = donors.begin();
      for (std::size_t k = 0; k < count; ++k) {
        Place donor = wanted_at(k);
        if (!donor.has_value()) {
          spare = std::find_if(spare, donors.end(), [&placed](std::size_t i) { return !placed[i]; });
          donor = *spare++;
        }
        donor_at[places[k]] = donor;
        as_it_is = as_it_is && donors[k] == *donor;
      }
    }
    if (as_it_is) {
      return;
    }
    for (const Place& donor : donor_at) {
      if (donor.has_value()) {
        pairs_.parameter_order.push_back(*donor);
      }
    }
  }

  const PairRequest& request_;
  std::vector<Place> donor_of_;   // by output
  std::vector<Place> output_of_;  // by parameter
  std::map<std::int64_t, SizeClass> classes_;
  DonorPairs pairs_;
};

}  // namespace

ArraySizes MeasureArrays(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots,
                         bool sharded) {
  ArraySizes sizes;
  for (const lazy::BackendDataPtr& parameter : parameters) {
    sizes.arrays.push_back(abi::DescribeBuffer(*parameter));
    sizes.bytes.push_back(BytesPerDevice(sharded ? WithoutLayout(sizes.arrays.back()) : sizes.arrays.back()));
  }
  for (const lazy::Value& root : roots) {
    const std::string array = abi::DescribeNode(root);
    const bool dynamic = IsDynamic(array);
    sizes.dynamic = sizes.dynamic || dynamic;
    sizes.output_bytes.push_back(BytesPerDevice(sharded ? WithoutLayout(array) : array));
    sizes.movable.push_back(ElementType(array).has_value() && !dynamic);
  }
  return sizes;
}

DonorPairs PairDonors(const PairRequest& request) { return Matching(request).Run(); }

}  // namespace torch_xla_donate
