// Donors of compiled graphs, which run outside of a step: torch.compile's, and the replays of compile(pure=True).
//
// A compiled graph's donors are fixed when it is compiled. OrderParameters() gives its parameters an order for them;
// each call announces the buffers that its run consumes.
//
// Threads: each of these belongs to the calling thread. Errors: none of its own.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "registry/registry.h"

namespace torch_xla_donate {

// Until the matching TakeOrder() the graphs that this thread hashes or compiles have their parameters in an order with
// which XLA gives each of these donors to the output computed from it. TakeOrder() describes the last of these graphs.
struct OrderedParameter {
  const lazy::BackendData* buffer;
  std::optional<std::size_t> successor;  // the output computed from it, if it is a donor
};
void OrderParameters(std::unordered_set<const lazy::BackendData*> donors);
std::vector<OrderedParameter> TakeOrder();
// Whether this thread is between the two.
bool IsExtracting();

// The next run of a compiled graph on this thread consumes the buffers given, which are marked by the call; the graph
// has been compiled with exactly them as donors. Ends with DisarmRun().
struct RunDonor {
  lazy::BackendDataPtr buffer;
  std::optional<std::size_t> parameter, successor;  // as in Donor
};
void DonateToNextRun(std::shared_ptr<const CallSite> call, std::vector<RunDonor> donors, std::string graph);
void DisarmRun();

// The registry has a step for the next run of this thread already: its donors were refused beforehand.
void ExpectRun();

}  // namespace torch_xla_donate
