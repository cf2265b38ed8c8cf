// Remembers the thread on which a backward pass makes tensors.
#include "features/backward_threads.h"

#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <functional>
#include <thread>

#include "step/observer.h"

namespace torch_xla_donate {

namespace {

std::atomic<std::size_t> backward_thread{0};
std::atomic<std::int64_t> steps{0};

std::size_t ThisThread() { return std::hash<std::thread::id>()(std::this_thread::get_id()); }

class BackwardThreads : public StepObserver {
  bool SeesTensors() const override { return true; }
  void TensorMade() override {
    if (torch::autograd::get_current_graph_task_id() != -1) {
      backward_thread.store(ThisThread(), std::memory_order_relaxed);
    }
  }
  // Counts the step if the last backward pass before it ran on another thread.
  void BeforeGraph(GraphContext& graph) override {
    const std::size_t thread = graph.is_step ? backward_thread.exchange(0, std::memory_order_relaxed) : 0;
    if (thread != 0 && thread != ThisThread()) {
      steps.fetch_add(1, std::memory_order_relaxed);
    }
  }
};

}  // namespace

StepObserver& BackwardThreadsFeature() { return TheOnly<BackwardThreads>(); }

std::int64_t StepsAfterBackwardThreads() { return steps.load(std::memory_order_relaxed); }

}  // namespace torch_xla_donate
