// Steps that follow a backward pass on a thread of autograd.
//
// Such a thread may still hold gradients when the backward pass has returned. Each is an output of a step that begins
// meanwhile, so steps of one loop differ at random. Which gradients are held cannot be seen; that they may be, can.
//
// Threads: atomics of the process. With several stepping threads a step may count a backward pass of another one.
// Errors: none.
#pragma once

#include <cstdint>

namespace torch_xla_donate {

// The steps counted so far.
std::int64_t StepsAfterBackwardThreads();

}  // namespace torch_xla_donate
