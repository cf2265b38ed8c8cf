// The planner chooses which inputs become donors, and the order of parameters and outputs by which XLA pairs them well.
//
// It decides once for each graph and dead set. Of each size it chooses as many inputs as there are outputs without
// another donor, each close to the output computed from it. The dead set of a loop may change, for example when the
// garbage collector frees a cycle. Then the planner makes at most kMaxChoices graphs and reuses one that fits.
//
// Ownership: the process keeps the last kKeptPlans plans, or fewer if together they exceed kKeptParameters. A plan
//   takes some hundred bytes for each parameter.
// Threads: any; one mutex guards everything. Errors: throws none itself.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/graphs.h"
#include "host/process_mutex.h"
#include "registry/registry.h"
#include "step/graph_arrays.h"

namespace torch_xla_donate {

// A step as the planner sees it: its donors, and the inputs that may become donors.
struct PlanRequest {
  const abi::Executor::PostOrderData& graph;
  const std::vector<lazy::Value>& roots;
  const lazy::BackendDevice& device;
  lazy::hash_t hash;  // of the graph without its donors
  bool sharded;       // SPMD: the compiler's shardings are not known yet
  bool automatic;     // whether inputs may become donors; otherwise only the step's donors are paired
  // By position of the parameter:
  std::vector<bool> held;                          // by a live tensor
  std::vector<bool> read_later;                    // by work that stays pending
  std::vector<bool> barred;                        // must not be donated, even if nothing holds it
  std::vector<bool> donors;                        // already in the donor set, by a mark or by torch_xla
  std::vector<bool> own;                           // torch_xla donates it, as an output replaces it in place
  std::vector<std::optional<std::size_t>> wanted;  // the output that such a donor was given
};

// By position of the parameter: whether an output that no donor takes has its size.
std::vector<bool> FindFits(const PlanRequest& request, const GraphArrays& arrays);

struct DonorChoice {
  DonorPairs pairs;
  std::vector<DonorArray> prototypes;  // of pairs.chosen, without buffers
  std::vector<bool> has_room;          // by parameter: an output of its size has no donor
  std::int64_t bytes = 0;
};

// An input that an output could have taken if nothing had held it.
struct HeldInput {
  std::string array;  // "f32[8,4]"
  std::int64_t bytes;
  lazy::BackendDevice device;
  bool by_tensor;  // a live tensor holds it; otherwise work that stays pending
  std::weak_ptr<const lazy::BackendData> buffer;
};

struct PlanResult {
  std::shared_ptr<const DonorChoice> choice;
  lazy::hash_t plan;
};

class DonorPlanner {
 public:
  static constexpr std::size_t kMaxChoices = 4;
  static constexpr std::size_t kKeptPlans = 1024, kKeptParameters = 1 << 18;

  // Never destroyed: hooks may run until the process ends.
  static DonorPlanner& Get();

  // Never returns a null choice. Linear in the parameters; slower for a dead set that is new for this graph.
  PlanResult Choose(const PlanRequest& request);

  // The compiler has not used these parameters, so the graph does not ask for them again.
  void OfNoUse(lazy::hash_t plan, const std::vector<std::size_t>& parameters);

  // The held inputs of each device's last step, from BeginStep() on; none if that step has not called Choose().
  std::vector<HeldInput> LastHeld() const;
  void BeginStep(const lazy::BackendDevice& device);

  std::size_t Size() const;

 private:
  using ChoicePtr = std::shared_ptr<const DonorChoice>;
  struct Plan {
    std::shared_ptr<const std::vector<std::string>> arrays;       // the parameters, as abi::DescribeBuffer writes them
    GraphArrays sizes;                                            // without the texts of `arrays`
    std::vector<bool> fits;                                       // an output of this size is free
    std::deque<std::pair<std::vector<bool>, ChoicePtr>> by_dead;  // the last answers, newest first
    std::vector<ChoicePtr> choices;                               // distinct; each may be a compiled graph
    std::vector<bool> always_dead;
  };

  void Forget(lazy::hash_t key);
  static Plan Look(const PlanRequest& request);
  static ChoicePtr Decide(const Plan& plan, const PlanRequest& request, const std::vector<bool>& dead);
  static ChoicePtr Settle(Plan& plan, const PlanRequest& request, const std::vector<bool>& dead);

  // The held inputs of a step that outputs had room for, without the texts.
  struct Left {
    struct Input {
      std::size_t parameter;
      bool by_tensor;
      std::weak_ptr<const lazy::BackendData> buffer;
    };
    std::shared_ptr<const std::vector<std::string>> arrays;
    std::vector<Input> inputs;
  };

  std::mutex& mutex_ = ProcessMutex(MutexOf::kDonorPlans);
  std::map<lazy::BackendDevice, Left> last_left_;
  std::unordered_map<lazy::hash_t, Plan, lazy::HashReducer> plans_;
  std::deque<lazy::hash_t> order_;
  std::size_t parameters_ = 0;  // of all plans
};

}  // namespace torch_xla_donate
