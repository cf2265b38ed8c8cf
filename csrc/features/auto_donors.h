// Automatic donation: the switch, and donors that the program has not marked.
//
// An input that nothing can reach after the step (liveness.h) may become a donor. plan.h chooses among them.
//
// Threads: any. A context's request belongs to its thread.
#pragma once

#include <cstddef>

namespace torch_xla_donate {

// Whether steps donate by liveness, for all threads or for this one. The last push of this thread has priority.
void SetAutoDonate(bool on);
bool AutoDonateIsDefault();
void PushAutoDonate(bool on);
std::size_t AutoDonateDepth();
void PopAutoDonate(std::size_t depth);
bool AutoDonates();

}  // namespace torch_xla_donate
