// Automatic donation: the switch, and the donors that the program has not marked.
//
// An input that nothing can reach after the step (liveness.h) may become a donor; which of them do is the planner's
// choice (donor_plans.h).
//
// Threads: any; wishes made with a context belong to its thread.
#pragma once

#include <cstddef>

namespace torch_xla_donate {

// Whether steps donate by liveness: on all threads, or on this one, where the last push counts before that.
void SetAutoDonate(bool on);
bool AutoDonateIsDefault();
void PushAutoDonate(bool on);
std::size_t AutoDonateDepth();
void PopAutoDonate(std::size_t depth);
bool AutoDonates();

// Whether other processes run the same program, whose steps must have the same donors.
void SetMultiProcess(bool on);

}  // namespace torch_xla_donate
