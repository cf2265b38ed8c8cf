// Steps that follow a backward pass on a thread of autograd.
//
// Such a thread may still hold gradients when the backward pass has returned. Each is an output of a step that begins
// meanwhile, so steps of one loop differ at random. The hooks see only that such a thread has run.
//
// Threads: atomics of the process. If several threads step, a step may count a backward pass of another thread.
// Errors: none.
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <functional>
#include <thread>

#include "step/observer.h"

namespace torch_xla_donate {

namespace {

std::atomic<std::size_t> backward_thread{0};

std::size_t ThisThread() { return std::hash<std::thread::id>()(std::this_thread::get_id()); }

class BackwardThreads : public StepObserver {
  bool SeesTensors() const override { return true; }
  void TensorMade() override {
    if (torch::autograd::get_current_graph_task_id() != -1) {
      backward_thread.store(ThisThread(), std::memory_order_relaxed);
    }
  }
  void BeforeGraph(GraphContext& graph) override {
    const std::size_t thread = graph.is_step ? backward_thread.exchange(0, std::memory_order_relaxed) : 0;
    graph.after_backward_thread = thread != 0 && thread != ThisThread();
  }
};

}  // namespace

StepObserver& BackwardThreadsFeature() { return TheOnly<BackwardThreads>(); }

}  // namespace torch_xla_donate
