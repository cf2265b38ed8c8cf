// Graphs with donors that have run for the first time. Python looks in them for copies of donated buffers.
//
// Threads: the switch is for the process, the rest for the calling thread. Errors: none of its own.
#pragma once

namespace torch_xla_donate {

void LookForCopies();  // for good
// Whether this thread has run such a graph since the last call of ForgetNewGraphs().
bool HasNewGraphs();
void ForgetNewGraphs();

}  // namespace torch_xla_donate
