// What a graph looks like to the planner of donors: the sizes of its arrays, and which parameters are near an output.
//
// Threads: functions of their arguments. Errors: none of its own.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "host/graphs.h"
#include "step/size_pairing.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// The size by which XLA pairs an array that is written as by abi::DescribeBuffer. Under SPMD, before a graph is
// compiled: the compiler shards what the program has not, and two arrays of one size most often end up alike, so the
// whole array counts there.
//
// Each comparison of sizes asks this function; a platform that pads its arrays needs another rule here only.
ArraySize SizeOf(const std::string& array, bool unsharded);

struct GraphArrays {
  std::vector<std::string> arrays;      // the parameters, as abi::DescribeBuffer writes them
  std::vector<ArraySize> bytes;         // of the parameters
  std::vector<ArraySize> output_bytes;  // the same of the outputs
  std::vector<bool> movable;            // by output: an array can be made to take it
  bool dynamic = false;                 // an output has a size that only the device knows
};
GraphArrays MeasureArrays(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots,
                          bool sharded);

// Finds the parameters near an output's root, for PairRequest::near. Both vectors must outlive it.
class NearParameters {
 public:
  NearParameters(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots)
      : parameters_(parameters), roots_(roots) {}
  std::vector<NearParameter> operator()(std::size_t output);

 private:
  const std::vector<lazy::BackendDataPtr>& parameters_;
  const std::vector<lazy::Value>& roots_;
  std::unordered_map<const lazy::BackendData*, std::size_t> position_of_;  // made when it is needed
};

}  // namespace torch_xla_donate
