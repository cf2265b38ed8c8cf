// Keeps runs from beginning that must not: those of a thread that traces a function, which are counted, and those that
// read a placeholder, an array without memory. torch_xla would end the process if it read one.
//
// Threads: blocks and counts belong to the calling thread; placeholders to the process.
// Errors: a blocked run or read, and a use of a placeholder, throw std::runtime_error.
#pragma once

#include <cstdint>
#include <vector>

#include "host/symbols.h"

namespace torch_xla_donate {

// While a thread's runs are blocked, running a graph throws. torch_xla's own switch for this would stop the steps of
// all other threads, too.
void BlockRuns(bool on);
bool BlocksRuns();
// While runs are blocked: whether reads of values throw, too. Arguments without memory would end the process.
// Returns the value before.
bool BlockReads(bool on);
std::uint64_t RunsBegun();
// How often this thread has passed the barrier before each read and run while its runs were blocked.
std::uint64_t BarriersPassed();

void NotePlaceholder(const lazy::BackendDataPtr& array);
// Called where the program uses an array, because pending values survive an error there, and not in the step.
void ThrowIfPlaceholder(const lazy::BackendData* array);

// ---- Phases of a step ----

// Whether a placeholder is alive, so that uses must be told from reads of the list. Forgets those that are gone.
bool HasPlaceholders();
void GuardBarrier();
void GuardRun(const std::vector<lazy::BackendDataPtr>& parameters);

}  // namespace torch_xla_donate
