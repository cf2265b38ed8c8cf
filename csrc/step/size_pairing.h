// XLA's rule for donors, and the order of parameters and outputs by which XLA gives each donor to its next value.
//
// XLA pairs donors and outputs of equal bytes per device in order: the first donor takes the first output, the second
// the second (measured on 2.9.0, test/step/test_pairs.py). If pairs cross, XLA copies. So each donor gets the output
// computed from it, and the parameters get the order of these outputs.
//
// This file has the only copy of the rule. It uses neither torch nor XLA.
//
// Threads: functions of their arguments. Errors: throws none itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace torch_xla_donate {

// Bytes per device; empty if unknown. An unknown size matches no other.
using ArraySize = std::optional<std::int64_t>;

// The outputs that no donor takes, counted by size.
class FreeOutputs {
 public:
  explicit FreeOutputs(const std::vector<ArraySize>& outputs);
  // A donor takes an output. Returns false if no output of its size is left.
  bool Take(const ArraySize& donor);
  // How many outputs of the donor's size are left.
  std::size_t Count(const ArraySize& donor) const;

 private:
  std::map<std::int64_t, std::size_t> count_;
};

struct NearParameter {
  std::size_t distance, parameter;
};

struct PairRequest {
  const std::vector<ArraySize>& bytes;
  const std::vector<ArraySize>& output_bytes;
  const std::vector<bool>& movable;  // by output: whether it may move
  // By position of the parameter:
  const std::vector<bool>& donors;                                  // already in the donor set
  const std::vector<bool>& offered;                                 // may join it if an output is left
  const std::vector<std::optional<std::size_t>>& preferred_output;  // of a donor, if the program has named one
  // The parameters from which an output is computed, nearest first. It is most likely the nearest one's next value.
  std::function<std::vector<NearParameter>(std::size_t output)> near;
  bool keep_order = false;  // leave parameters and outputs where they are, even if pairs cross
};

struct DonorPairs {
  std::vector<std::size_t> chosen;                           // of the offered ones, sorted
  std::vector<std::optional<std::size_t>> preferred_output;  // by parameter: that of the request, or computed from it
  std::vector<std::size_t> parameter_order;                  // by new place, the parameter that moves there
  std::vector<std::size_t> output_order;                     // by new place, the output that moves there
  std::vector<bool> has_room;                                // by parameter: an output of its size has no donor
};

DonorPairs PairDonors(const PairRequest& request);

}  // namespace torch_xla_donate
