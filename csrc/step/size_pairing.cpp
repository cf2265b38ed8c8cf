// Greedy matching by distance in the graph, then the orders that follow from it.
#include "step/size_pairing.h"

#include <algorithm>
#include <deque>
#include <iterator>
#include <numeric>
#include <tuple>
#include <utility>

namespace torch_xla_donate {

namespace {

using Place = std::optional<std::size_t>;

struct Candidate {
  std::size_t distance, output, nearness, parameter;
  bool operator<(const Candidate& other) const {
    return std::tie(distance, output, nearness) < std::tie(other.distance, other.output, other.nearness);
  }
};

// The donors and outputs of one size, as XLA pairs them.
struct SizeClass {
  std::vector<std::size_t> outputs;
  std::vector<std::size_t> donors;
  std::deque<std::size_t> waiting;  // donors without an output, and offered inputs

  bool HasRoom() const { return donors.size() < outputs.size(); }
};

class Matching {
 public:
  explicit Matching(const PairRequest& request)
      : request_(request), donor_of_(request.output_bytes.size()), output_of_(request.bytes.size()) {
    for (std::size_t output = 0; output < request.output_bytes.size(); ++output) {
      if (const auto& bytes = request.output_bytes[output]) {
        classes_[*bytes].outputs.push_back(output);
      }
    }
    pairs_.preferred_output.resize(request.bytes.size());
    for (std::size_t i = 0; i < request.bytes.size(); ++i) {
      if (request.donors[i] && request.bytes[i].has_value()) {
        classes_[*request.bytes[i]].donors.push_back(i);
      }
    }
  }

  DonorPairs Run() {
    for (std::size_t i = 0; i < request_.bytes.size(); ++i) {
      if (request_.donors[i] && request_.preferred_output[i].has_value()) {
        pairs_.preferred_output[i] = request_.preferred_output[i];
        Pair(*request_.preferred_output[i], i);
      }
    }
    PairByFlow();
    PairTheRest();
    for (const ArraySize& bytes : request_.bytes) {
      pairs_.has_room.push_back(bytes.has_value() && classes_[*bytes].HasRoom());
    }
    std::sort(pairs_.chosen.begin(), pairs_.chosen.end());
    pairs_.parameter_order.resize(request_.bytes.size());
    std::iota(pairs_.parameter_order.begin(), pairs_.parameter_order.end(), std::size_t{0});
    pairs_.output_order.resize(request_.output_bytes.size());
    std::iota(pairs_.output_order.begin(), pairs_.output_order.end(), std::size_t{0});
    if (!request_.keep_order) {
      MoveOutputs();
      OrderParameters();
    }
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
      if (!group.HasRoom()) {
        return false;
      }
      group.donors.push_back(parameter);
      pairs_.chosen.push_back(parameter);
    }
    donor_of_[output] = parameter;
    output_of_[parameter] = output;
    return true;
  }

  void PairByFlow() {
    std::vector<bool> open(request_.bytes.size());
    for (std::size_t i = 0; i < open.size(); ++i) {
      open[i] = (request_.donors[i] || request_.offered[i]) && !IsTaken(i);
    }
    if (std::find(open.begin(), open.end(), true) == open.end()) {
      return;
    }
    std::vector<Candidate> candidates;
    for (std::size_t output = 0; output < donor_of_.size(); ++output) {
      if (!request_.output_bytes[output].has_value() || donor_of_[output].has_value()) {
        continue;
      }
      std::size_t nearness = 0;
      for (const NearParameter& found : request_.near(output)) {
        if (open[found.parameter]) {
          candidates.push_back({found.distance, output, nearness++, found.parameter});
        }
      }
    }
    std::sort(candidates.begin(), candidates.end());
    for (const Candidate& found : candidates) {
      if (Pair(found.output, found.parameter)) {
        pairs_.preferred_output[found.parameter] = found.output;
      }
    }
  }

  // Donors from which no output is computed take any output of their size. Members of the donor set come first.
  void PairTheRest() {
    for (const bool in_set : {true, false}) {
      for (std::size_t i = 0; i < request_.bytes.size(); ++i) {
        if ((in_set ? request_.donors[i] : request_.offered[i] && !request_.donors[i]) && !IsTaken(i) &&
            request_.bytes[i].has_value()) {
          classes_[*request_.bytes[i]].waiting.push_back(i);
        }
      }
    }
    for (std::size_t output = 0; output < request_.output_bytes.size(); ++output) {
      if (!request_.output_bytes[output].has_value() || donor_of_[output].has_value()) {
        continue;
      }
      auto& waiting = classes_[*request_.output_bytes[output]].waiting;
      // Offered inputs come after the donors. So there is room for one if this output is left for it.
      if (!waiting.empty()) {
        Pair(output, waiting.front());
        waiting.pop_front();
      }
    }
  }

  // XLA gives donors to the first outputs of their size, so outputs with a donor move before those without.
  void MoveOutputs() {
    for (const auto& [bytes, group] : classes_) {
      if (group.donors.empty() || !group.HasRoom()) {
        continue;
      }
      std::vector<std::size_t> places;
      std::copy_if(group.outputs.begin(), group.outputs.end(), std::back_inserter(places),
                   [this](std::size_t output) { return request_.movable[output]; });
      std::vector<std::size_t> sorted = places;
      std::stable_partition(sorted.begin(), sorted.end(),
                            [this](std::size_t output) { return donor_of_[output].has_value(); });
      for (std::size_t k = 0; k < places.size(); ++k) {
        pairs_.output_order[places[k]] = sorted[k];
      }
    }
  }

  // Finds the donor that XLA should give to each output, size by size. XLA compares only the order of the donors of one
  // size. So these change places among themselves, and every other parameter keeps its number, because XLA may round
  // differently in a graph with another order.
  void OrderParameters() {
    std::vector<bool> placed(request_.bytes.size(), false);
    for (auto& [bytes, group] : classes_) {
      std::vector<std::size_t>& donors = group.donors;
      std::sort(donors.begin(), donors.end());
      const std::vector<std::size_t>& places = group.outputs;
      const std::size_t count = std::min(places.size(), donors.size());
      std::vector<Place> wanted;
      for (std::size_t k = 0; k < count; ++k) {
        wanted.push_back(donor_of_[pairs_.output_order[places[k]]]);
        if (wanted.back().has_value()) {
          placed[*wanted.back()] = true;
        }
      }
      // XLA will use the first `count` places. A donor whose output comes later cannot take it, so it fills a gap.
      wanted.resize(donors.size());
      auto spare = donors.begin();
      for (std::size_t k = 0; k < donors.size(); ++k) {
        if (!wanted[k].has_value()) {
          spare = std::find_if(spare, donors.end(), [&placed](std::size_t i) { return !placed[i]; });
          wanted[k] = *spare++;
        }
        pairs_.parameter_order[donors[k]] = *wanted[k];
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

FreeOutputs::FreeOutputs(const std::vector<ArraySize>& outputs) {
  for (const ArraySize& output : outputs) {
    if (output.has_value()) {
      ++count_[*output];
    }
  }
}

std::size_t FreeOutputs::Count(const ArraySize& donor) const {
  const auto found = donor.has_value() ? count_.find(*donor) : count_.end();
  return found == count_.end() ? 0 : found->second;
}

bool FreeOutputs::Take(const ArraySize& donor) {
  const bool fits = Count(donor) > 0;
  if (fits) {
    --count_[*donor];
  }
  return fits;
}

DonorPairs PairDonors(const PairRequest& request) { return Matching(request).Run(); }

}  // namespace torch_xla_donate
