// XLA's rule for donors, and the order of parameters and outputs that makes it pair each donor with its next value.
//
// XLA pairs donors and outputs of equal bytes per device in their order: the first donor goes to the first output, the
// second to the second (measured on 2.9.0, test/test_into.py). Where a pair crosses, XLA copies. So each donor gets the
// output that is computed from it, and the parameters are put into the order of these outputs.
//
// This is the only copy of the rule. It knows neither torch nor XLA.
//
// Threads: functions of their arguments. Errors: none of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace torch_xla_donate {

// Bytes per device; nothing where the size is not known, which fits nothing.
using ArraySize = std::optional<std::int64_t>;

// The outputs that no donor takes, counted by size.
class FreeOutputs {
 public:
  FreeOutputs() = default;
  explicit FreeOutputs(const std::vector<ArraySize>& outputs);
  // A donor takes one; false if no output of its size is left.
  bool Take(const ArraySize& donor);
  // How many of a donor's size are left.
  std::size_t Count(const ArraySize& donor) const;
  // The sizes of which an output is left, sorted.
  std::vector<std::int64_t> Sizes() const;

 private:
  std::map<std::int64_t, std::size_t> count_;
};

// A parameter near the root of an output, in a graph.
struct NearParameter {
  std::size_t distance, parameter;
};

struct PairRequest {
  const std::vector<ArraySize>& bytes;
  const std::vector<ArraySize>& output_bytes;
  const std::vector<bool>& movable;  // by output: whether it may get another place
  // By position of the parameter:
  const std::vector<bool>& donors;                        // in the donor set already
  const std::vector<bool>& offered;                       // may join it if an output is left
  const std::vector<std::optional<std::size_t>>& wanted;  // the output that a donor has been given
  // The parameters from which an output is computed, nearest first: it is most likely their next value.
  std::function<std::vector<NearParameter>(std::size_t output)> near;
};

struct DonorPairs {
  std::vector<std::size_t> chosen;                    // of those offered, sorted
  std::vector<std::optional<std::size_t>> successor;  // by parameter: the output wanted or computed from it
  std::vector<std::size_t> parameter_order;           // the parameters to put first; empty: leave them as they are
  std::vector<std::size_t> output_order;              // by new place: the output that goes there; empty: as they are
  std::vector<std::int64_t> room;                     // sizes of outputs that are left without a donor
};

DonorPairs PairDonors(const PairRequest& request);

}  // namespace torch_xla_donate
