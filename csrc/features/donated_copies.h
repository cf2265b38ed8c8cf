// Graphs with donors that have run for the first time. Python searches them for copies of donated buffers.
//
// Threads: the switch is for the process, the rest for the calling thread. Errors: throws none itself.
#pragma once

#include <cstddef>

namespace torch_xla_donate {

void LookForCopies();  // cannot be switched off
// Whether this thread has run such a graph since the last ForgetNewGraphs().
bool HasNewGraphs();
void ForgetNewGraphs();
std::size_t GraphsLookedAt();

}  // namespace torch_xla_donate
