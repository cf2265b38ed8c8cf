// Keeps a thread that traces a function from running graphs, and counts what it runs and waits for.
//
// Threads: all but VerifyExecutor() belong to the calling thread. Errors: a blocked run raises std::runtime_error.
#pragma once

#include <cstdint>

namespace torch_xla_donate {

// While a thread's runs are blocked, a graph that it is about to run makes std::runtime_error. torch_xla has a switch
// for this, which would stop the steps of all other threads, too.
void BlockRuns(bool on);
// How many graphs this thread has begun to run.
std::uint64_t RunsBegun();
// How often this thread has passed the barrier that stands before every read and every run, while its runs were
// blocked.
std::uint64_t BarriersPassed();

// Throws std::runtime_error if torch_xla's executor is not laid out as expected, or has not passed a hook yet.
void VerifyExecutor(bool eager_mode, bool allow_execution);

}  // namespace torch_xla_donate
