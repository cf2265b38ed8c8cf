// Donors of compiled graphs, which run outside a step: torch.compile's, and the replays of compile(pure=True).
//
// A compiled graph's donors are fixed when it is compiled. OrderParameters() orders its parameters for them. Each call
// announces the buffers that its run consumes.
//
// Threads: all functions act on the calling thread. Errors: throws none itself.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "registry/steps.h"
#include "step/phases.h"

namespace torch_xla_donate {

// Until TakeOrder(), this thread orders the parameters of each graph that it hashes or compiles. With that order XLA
// gives each of these donors to the output computed from it. TakeOrder() describes the last of these graphs.
// For each parameter its buffer, as `identity` gives it, and if it is a donor the output computed from it.
using OrderedParameter = std::pair<std::uintptr_t, std::optional<std::size_t>>;
void OrderParameters(std::unordered_set<const lazy::BackendData*> donors);
std::vector<OrderedParameter> TakeOrder();
// Whether this thread is between OrderParameters() and TakeOrder().
bool IsExtracting();

// This thread's next run of a compiled graph consumes the given buffers, which the call has marked: the graph has been
// compiled with exactly these donors, or, without `consumes`, with none of them, because donation is disabled. Until
// DisarmRun() nothing can cancel the marks. Returns false, and does nothing, if one of them has been cancelled since.
// `offers` has the places of each buffer in the graph.
bool DonateToNextRun(const CallSite* call, const std::vector<const lazy::BackendData*>& buffers,
                     std::vector<Steps::Offer> offers, std::string graph, bool consumes);
void DisarmRun();

// The registry already has a step for this thread's next run, because its donors were refused before.
void ExpectRun();

// ---- Phases of a step ----

void OrderForDonors(GraphContext& context);
void ClaimAnnounced(RunContext& run);

}  // namespace torch_xla_donate
