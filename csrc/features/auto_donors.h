// Automatic donation: offers donors that the program has not marked. switches.h has the switch.
//
// An input that nothing can reach after the step (liveness.h) may become a donor. DonorSet::Commit() asks the
// planner to choose among them after this phase, so only donor_set.cpp knows which were chosen.
//
// Threads: each function belongs to the thread that steps. Errors: the exceptions of callbacks::PrepareAuto().
#pragma once

#include "step/phases.h"

namespace torch_xla_donate {

// ---- Phases of a step ----

// Returns whether automatic donation needs the list of live tensors.
bool ListForAutoDonors();
void ProposeAutoDonors(DonorSet& step);

}  // namespace torch_xla_donate
