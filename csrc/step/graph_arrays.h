// A graph as the planner of donors sees it: the sizes of its arrays, and the parameters near an output.
//
// Threads: functions of their arguments. Errors: throws none itself.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "host/array_text.h"
#include "host/graphs.h"
#include "step/plan.h"

namespace torch_xla_donate {

// The size by which XLA pairs an array, given as text of abi::DescribeBuffer. Before a graph is compiled under SPMD,
// the size of the whole array counts (`unsharded`). The compiler shards the arrays that the program has not sharded,
// and arrays of equal size mostly get equal shardings.
//
// All comparisons of sizes use this function. The rule is the platform's, unless this thread has forced another.
ArraySize SizeOf(const std::string& array, bool unsharded);

// Sets the rule for this thread, to order parameters for a platform that is not there; empty for the platform's.
void ForceSizeRule(std::optional<SizeRule> rule);

// Whether steps keep the order of their parameters and outputs, for the process.
void SetKeepOrder(bool on);
bool KeepsOrder();

struct GraphArrays : GraphSizes {
  std::vector<std::string> arrays;  // the parameters, as abi::DescribeBuffer writes them
};
GraphArrays MeasureArrays(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots,
                          bool sharded);

// Finds the parameters near an output's root, for Plan(). Both vectors must outlive the result.
FindNear NearParameters(const std::vector<lazy::BackendDataPtr>& parameters, const std::vector<lazy::Value>& roots);

}  // namespace torch_xla_donate
