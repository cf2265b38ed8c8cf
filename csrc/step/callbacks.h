// The functions of Python that the hooks call. python/callbacks.cpp has them; SetCallbacks() comes before the hooks are
// installed.
//
// Threads: any, without locks. Each takes the GIL, except where its comment says otherwise.
// Errors: each passes on the exceptions of Python, except where its comment says that it runs no bytecode. Before the
//   next bytecode Python runs a signal handler, which may raise.
#pragma once

#include <torch/csrc/python_headers.h>

#include <string>
#include <tuple>
#include <vector>

#include "registry/donor.h"

namespace torch_xla_donate {

// A frame of Python's stack: the name of its module, its file and its line.
using StackFrame = std::tuple<std::string, std::string, int>;

namespace callbacks {

// The exception type. Needs no GIL.
PyObject* DonatedBufferError();
// The message for a use of a consumed buffer.
std::string DescribeUse(const DonorSnapshot& donor, std::uint64_t step);
// The program uses a buffer that a step would have consumed if donation were enabled.
void ReportReuse(const DonorSnapshot& donor, std::uint64_t step);
// Called before the first list of live tensors for automatic donation, to verify its assumptions. Returns why this
// process cannot donate automatically; empty if it can. Several threads may call it at a time. If it throws, the step
// does not begin, and the next step retries.
Reason PrepareAuto();
// Called before a step chooses its donors. Drops the token that orders the collectives of the device (given by name).
// Returns whether auto-sharding is on by now. Runs no bytecode. If it throws, the step donates nothing.
bool ForgetCollectives(const std::string& device);
// Whether torch_xla runs each operation at once, as a separate graph. Runs no bytecode.
bool InEagerMode();
// Called at the end of a step that has something to report or to check.
void StepEnded();
// The frames of this thread, innermost first; at most 64. Runs no bytecode.
std::vector<StackFrame> PythonStack();
// Records the logged runs: now; or soon, in Python's main thread, between bytecodes, which needs no GIL.
void RecordRuns();
void RecordRunsSoon();

}  // namespace callbacks

}  // namespace torch_xla_donate
