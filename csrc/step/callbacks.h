// What the Python side lends to the hooks. Each is set once, before the hooks are installed.
//
// Signals: Python runs a handler, which may raise, before the next bytecode, and that may be one of a callback. So each
//   callback passes on what is raised in it, or runs no bytecode.
#pragma once

#include <torch/csrc/python_headers.h>

#include <functional>
#include <string>

#include "registry/registry.h"

namespace torch_xla_donate {

struct HookCallbacks {
  PyObject* donated_buffer_error = nullptr;  // exception type, immortal
  // The message for a use of a consumed buffer. Called without locks; may take the GIL and throw.
  std::function<std::string(const Donor&, std::uint64_t step)> describe_use;
  // Called where somebody uses a buffer that a step would have consumed, had donation not been disabled. Called without
  // locks; may take the GIL and throw.
  std::function<void(const Donor&, std::uint64_t step)> report_reuse;
  // Called before the first list of live tensors that automatic donation needs: verifies what it relies on. Returns why
  // nothing can be donated automatically in this process; empty if it can. May take the GIL and throw: then the step is
  // not begun, and the next one asks again.
  std::function<Reason()> prepare_auto;
  // Called before the donors of a step are chosen: drops the token that orders the collectives of a device, by its
  // name, and looks whether auto-sharding is on by now. Called without locks; may take the GIL, but runs no bytecode;
  // if it throws, nothing is donated.
  std::function<void(const std::string& device)> forget_collectives;
  // Called at the end of a step when there is something to report or to check. May take the GIL and throw.
  std::function<void()> step_ended;
};

void SetHookCallbacks(HookCallbacks callbacks);
const HookCallbacks& Callbacks();

}  // namespace torch_xla_donate
