// Prevents a thread that traces a function from running graphs, and counts its runs and waits.
//
// Threads: all but VerifyExecutor() belong to the calling thread. Errors: a blocked run raises std::runtime_error.
#pragma once

#include <cstdint>

namespace torch_xla_donate {

// While a thread's runs are blocked, running a graph throws std::runtime_error. torch_xla's own switch for this would
// stop the steps of all other threads, too.
void BlockRuns(bool on);
bool BlocksRuns();
// While runs are blocked: whether reads of values throw, too. Arguments without memory would end the process.
// Returns the value before.
bool BlockReads(bool on);
std::uint64_t RunsBegun();
// How often this thread has passed the barrier before each read and run while its runs were blocked.
std::uint64_t BarriersPassed();

// Throws std::runtime_error if torch_xla's executor has another layout, or has not passed a hook yet.
void VerifyExecutor(bool eager_mode, bool allow_execution);

}  // namespace torch_xla_donate
