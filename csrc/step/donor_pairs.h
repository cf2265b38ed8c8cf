// Which output takes over which donor's buffer, and the order of parameters and outputs with which XLA pairs them so.
//
// XLA pairs donors and outputs of equal bytes per device in their order: the first donor goes to the first output, the
// second to the second (measured on 2.9.0, test/test_into.py). Where a pair crosses, XLA copies. So each donor gets the
// output that is computed from it, and the parameters are put into the order of these outputs.
//
// Threads: functions of their arguments. Errors: none of its own.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "host/torch_xla_abi.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// What XLA compares. Under SPMD the compiler shards what the program has not, and two arrays of one size most often end
// up alike, so the whole array counts there.
struct ArraySizes {
  std::vector<std::string> arrays;                        // the parameters, as abi::DescribeBuffer writes them
  std::vector<std::optional<std::int64_t>> bytes;         // per device; nothing where the size is not known
  std::vector<std::optional<std::int64_t>> output_bytes;  // the same
  std::vector<bool> movable;                              // by output: an array can be made to take it
  bool dynamic = false;                                   // an output has a size that only the device knows
};
ArraySizes MeasureArrays(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots,
                         bool sharded);

struct PairRequest {
  const std::vector<lazy::BackendDataPtr>& parameters;
  const std::vector<lazy::Value>& roots;
  // Per device; nothing where the size is not known.
  const std::vector<std::optional<std::int64_t>>& bytes;
  const std::vector<std::optional<std::int64_t>>& output_bytes;
  const std::vector<bool>& movable;  // by output: whether it may get another place
  // By position of the parameter:
  const std::vector<bool>& donors;                        // in the donor set already
  const std::vector<bool>& offered;                       // may join it if an output is left
  const std::vector<std::optional<std::size_t>>& wanted;  // the output that a donor has been given
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
