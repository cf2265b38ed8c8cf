// Steps that follow a backward pass on a thread of autograd.
//
// Such a thread may still hold gradients when the backward pass has returned. Each is an output of a step that begins
// meanwhile, so steps of one loop differ at random. The hooks see only that such a thread has run.
//
// Threads: an atomic of the process. If several threads step, a step may count a backward pass of another thread.
// Errors: none.
#pragma once

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <functional>
#include <thread>

namespace torch_xla_donate {

inline std::atomic<std::size_t> backward_thread{0};

// A thread makes a tensor.
inline void NoteBackwardThread() {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    backward_thread.store(std::hash<std::thread::id>()(std::this_thread::get_id()), std::memory_order_relaxed);
  }
}

// Whether another thread has run a backward pass since the last call.
inline bool TakeBackwardThread() {
  const std::size_t thread = backward_thread.exchange(0, std::memory_order_relaxed);
  return thread != 0 && thread != std::hash<std::thread::id>()(std::this_thread::get_id());
}

}  // namespace torch_xla_donate
