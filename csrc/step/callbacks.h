// The functions and objects of Python that the hooks use. They are set once, before the hooks are installed.
//
// Signals: Python runs a signal handler, which may raise, before the next bytecode, and a callback may run that
//   bytecode. So each callback passes on the exceptions raised in it, or runs no bytecode.
#pragma once

#include <torch/csrc/python_headers.h>

#include <functional>
#include <string>
#include <vector>

#include "registry/donor.h"

namespace torch_xla_donate {

// A frame of Python's stack: the name of its module, its file and its line.
struct StackFrame {
  std::string module, file;
  int line;
};

struct HookCallbacks {
  PyObject* donated_buffer_error = nullptr;  // exception type, never freed
  // Returns the message for a use of a consumed buffer. Called without locks; may take the GIL and throw.
  std::function<std::string(const DonorSnapshot&, std::uint64_t step)> describe_use;
  // Called when the program uses a buffer that a step would have consumed if donation were enabled. Called without
  // locks; may take the GIL and throw.
  std::function<void(const DonorSnapshot&, std::uint64_t step)> report_reuse;
  // Called before the first list of live tensors for automatic donation, to verify its assumptions. Returns why this
  // process cannot donate automatically; empty if it can. Several threads may call it at a time. May take the GIL and
  // throw. Then the step does not begin. The next step retries.
  std::function<Reason()> prepare_auto;
  // Called before a step chooses its donors. Drops the token that orders the collectives of the device (given by name),
  // and checks whether auto-sharding is on by now. Called without locks. May take the GIL, but runs no bytecode. If it
  // throws, the step donates nothing.
  std::function<void(const std::string& device)> forget_collectives;
  // Called at the end of a step that has something to report or to check. May take the GIL and throw.
  std::function<void()> step_ended;
  // The frames of this thread, innermost first; at most 64. Called without locks. Takes the GIL, but runs no bytecode.
  std::function<std::vector<StackFrame>()> python_stack;
  // Records the logged runs: now, which may take the GIL and throw; or soon, in Python's main thread, between
  // bytecodes.
  std::function<void()> record_runs;
  std::function<void()> record_runs_soon;
};

// Never destroyed: hooks may run until the process ends.
inline HookCallbacks& Callbacks() {
  static HookCallbacks* callbacks = new HookCallbacks();
  return *callbacks;
}

}  // namespace torch_xla_donate
