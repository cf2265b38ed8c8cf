#include "features/backward_threads.h"

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <functional>
#include <thread>

namespace torch_xla_donate {

namespace {

std::atomic<std::size_t> backward_thread{0};

std::size_t ThisThread() { return std::hash<std::thread::id>()(std::this_thread::get_id()); }

}  // namespace

void NoteBackwardThread() {
  if (torch::autograd::get_current_graph_task_id() != -1) {
    backward_thread.store(ThisThread(), std::memory_order_relaxed);
  }
}

bool TakeBackwardThread() {
  const std::size_t thread = backward_thread.exchange(0, std::memory_order_relaxed);
  return thread != 0 && thread != ThisThread();
}

}  // namespace torch_xla_donate
