// Keeps the plans of graphs that run again, and bounds the number of graphs that they make.
//
// A graph gets one plan for each set of inputs out of reach. That set may change in a loop, for example when the
// garbage collector frees a cycle. Then the planner makes kMaxChoices graphs, at most one for the inputs that were free
// every time, and one without free inputs. It reuses one that fits.
//
// Ownership: the process keeps the last kKeptPlans plans, or fewer if together they exceed kKeptParameters. A plan
//   takes some hundred bytes for each parameter.
// Threads: any; one mutex guards everything. Errors: throws none itself.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/array_text.h"
#include "host/graphs.h"
#include "host/never_destroyed.h"
#include "host/process_mutex.h"
#include "registry/donor.h"
#include "step/graph_arrays.h"
#include "step/plan.h"

namespace torch_xla_donate {

// A step before it is planned.
struct StepFacts {
  const abi::Executor::PostOrderData& graph;
  const std::vector<lazy::Value>& roots;
  const lazy::BackendDevice& device;
  lazy::hash_t hash;  // of the graph without its donors
  bool sharded;       // SPMD: the compiler's shardings are not known yet
  bool automatic;     // whether inputs may become donors; otherwise only the step's donors are paired
  std::vector<PlanInput> inputs;

  GraphArrays Measure() const { return MeasureArrays(graph.parameters_data, roots, sharded); }
  // A plan that is not kept.
  StepPlan PlanFor(const GraphSizes& sizes) const {
    return Plan(sizes, inputs, NearParameters(graph.parameters_data, roots), KeepsOrder());
  }
};

struct DonorChoice {
  DonorPairs pairs;
  std::vector<std::vector<std::int64_t>> sizes;  // of pairs.chosen: those of the whole arrays
  std::int64_t bytes = 0;
};

// An input that an output could have taken if nothing had held it.
struct HeldInput {
  // Of all parameters of the graph, as abi::DescribeBuffer writes them.
  std::shared_ptr<const std::vector<std::string>> arrays;
  std::size_t parameter;
  lazy::BackendDevice device;
  bool by_tensor;  // a live tensor holds it; otherwise work that stays pending
  std::weak_ptr<const lazy::BackendData> buffer;

  std::string Array() const { return WithoutLayout((*arrays)[parameter]); }  // "f32[8,4]"
};

struct PlanResult {
  std::shared_ptr<const DonorChoice> choice;
  lazy::hash_t plan;
};

class DonorPlanner {
 public:
  static constexpr std::size_t kMaxChoices = 4;
  static constexpr std::size_t kKeptPlans = 1024, kKeptParameters = 1 << 18;

  static DonorPlanner& Get() { return NeverDestroyed<DonorPlanner>(); }

  // Never returns a null choice. Linear in the parameters; slower for a set out of reach that is new for this graph.
  PlanResult Choose(const StepFacts& step);

  // The step has run. Where only the compiler chooses shardings, only the outcome of the chosen donors shows which ones
  // it has used. The graph does not ask for the others again. Does nothing in one of several processes, which must all
  // compile the same graph: the next step may come before or after this call.
  void Learn(const PlanResult& plan, const std::vector<DonorPtr>& donors);
  void SetMultiProcess(bool on) { multi_process_.store(on, std::memory_order_relaxed); }

  // The held inputs of each device's last step, from BeginStep() on; none if that step has not called Choose().
  std::vector<HeldInput> LastHeld() const;
  void BeginStep(const lazy::BackendDevice& device);

  std::size_t Size() const;

 private:
  using ChoicePtr = std::shared_ptr<const DonorChoice>;
  struct KeptPlan {
    std::shared_ptr<const std::vector<std::string>> arrays;  // the parameters, as abi::DescribeBuffer writes them
    GraphSizes sizes;
    std::vector<bool> fits;                                       // an output of this size is free
    std::deque<std::pair<std::vector<bool>, ChoicePtr>> by_free;  // the last answers, newest first
    std::vector<ChoicePtr> choices;                               // distinct; each may be a compiled graph
    std::vector<bool> always_free;
  };

  void Forget(lazy::hash_t key);
  static KeptPlan Look(const StepFacts& step);
  static ChoicePtr Decide(const KeptPlan& plan, const StepFacts& step, const std::vector<bool>& free);
  static ChoicePtr ChooseFallback(KeptPlan& plan, const StepFacts& step, const std::vector<bool>& free);

  std::mutex& mutex_ = ProcessMutex(MutexOf::kDonorPlans);
  std::atomic<bool> multi_process_{false};
  std::map<lazy::BackendDevice, std::vector<HeldInput>> last_held_;  // those that outputs had room for
  std::unordered_map<lazy::hash_t, KeptPlan, lazy::HashReducer> plans_;
  std::deque<lazy::hash_t> order_;
  std::size_t parameters_ = 0;  // of all plans
};

}  // namespace torch_xla_donate
