// Steps that follow a backward pass on a thread of autograd.
//
// Such a thread may still hold gradients when the backward pass has returned. Each is an output of a step that begins
// meanwhile, so steps of one loop differ at random. Which gradients are held cannot be seen; that they may be, can.
//
// Threads: atomics of the process. With several stepping threads a step may take a backward pass of another one.
// Errors: none.
#pragma once

namespace torch_xla_donate {

// Call this where a tensor is made: in a backward pass, it remembers the thread.
void NoteBackwardThread();
// A step begins on this thread. Whether a backward pass since the step before ran on another thread.
bool TakeBackwardThread();

}  // namespace torch_xla_donate
