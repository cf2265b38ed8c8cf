// The planner: which inputs become donors, and in which order parameters and outputs make XLA pair them well.
//
// It decides once for each graph and dead set: as many inputs of each size as there are outputs that no other donor
// takes, each close to the output that is made of it. A loop whose dead set flips (the garbage collector frees a cycle
// at odd times) is held to kMaxChoices graphs, and to the choice that fits from then on.
//
// Ownership: the plans live as long as the process, the last kKeptPlans of them, or the last ones that have
//   kKeptParameters together: a plan takes some hundred bytes for each.
// Threads: any; one mutex guards all. Errors: none of its own.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "host/graphs.h"
#include "registry/registry.h"
#include "step/graph_arrays.h"

namespace torch_xla_donate {

// What a step looks like to the planner: which donors it has, and which inputs may become donors.
struct PlanRequest {
  const abi::Executor::PostOrderData& graph;
  const std::vector<lazy::Value>& roots;
  const lazy::BackendDevice& device;
  lazy::hash_t hash;  // of the graph without its donors
  bool sharded;       // SPMD: what the compiler shards is not known before
  bool automatic;     // whether inputs may become donors; otherwise the step's donors are paired alone
  // By position of the parameter:
  std::vector<bool> held;                          // by a live tensor
  std::vector<bool> read_later;                    // by work that stays pending
  std::vector<bool> barred;                        // not to be donated, whoever holds it
  std::vector<bool> donors;                        // in the donor set already, by a mark or by torch_xla
  std::vector<std::optional<std::size_t>> wanted;  // the output that such a donor has been given
};

// The parameters to ask for.
struct DonorChoice {
  std::vector<std::size_t> parameters;
  std::vector<DonorPtr> prototypes;  // what the report will say of each; without a buffer
  DonorPairs pairs;
  std::int64_t bytes = 0;
};

// An input that an output could have taken over, had nobody held it.
struct HeldInput {
  std::string array;  // "f32[8,4]"
  std::int64_t bytes;
  lazy::BackendDevice device;
  bool by_tensor;  // held by a live tensor; otherwise by work that stays pending
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

  // The choice is never null. Linear in the parameters; a dead set that this graph has not been seen with costs more.
  PlanResult Choose(const PlanRequest& request);

  // The compiler has had no use for these parameters: the graph does not ask for them again.
  void OfNoUse(lazy::hash_t plan, const std::vector<std::size_t>& parameters);

  // Of the last step of each device; nothing of one that has not come to Choose(). A step begins with BeginStep().
  std::vector<HeldInput> LastHeld() const;
  void BeginStep(const lazy::BackendDevice& device);

  std::size_t Size() const;

 private:
  using ChoicePtr = std::shared_ptr<const DonorChoice>;
  struct Plan {
    std::shared_ptr<const std::vector<std::string>> arrays;       // the parameters, as abi::DescribeBuffer writes them
    GraphArrays sizes;                                            // without the texts of `arrays`
    std::vector<bool> fits;                                       // an output of this size is free
    std::deque<std::pair<std::vector<bool>, ChoicePtr>> by_dead;  // answers given, newest first
    std::vector<ChoicePtr> choices;                               // distinct; each may be a compiled graph
    std::vector<bool> always_dead;
  };

  void Forget(lazy::hash_t key);
  static Plan Look(const PlanRequest& request);
  static ChoicePtr Decide(const Plan& plan, const PlanRequest& request, const std::vector<bool>& dead);
  static ChoicePtr Settle(Plan& plan, const PlanRequest& request, const std::vector<bool>& dead);

  // What a step has left alone, without the texts.
  struct Left {
    std::shared_ptr<const std::vector<std::string>> arrays;
    ChoicePtr choice;
    std::vector<std::size_t> held, read_later;                                        // parameters
    std::unordered_map<std::size_t, std::weak_ptr<const lazy::BackendData>> buffers;  // of these
  };

  mutable std::mutex mutex_;
  std::map<lazy::BackendDevice, Left> last_left_;
  std::unordered_map<lazy::hash_t, Plan, lazy::HashReducer> plans_;
  std::deque<lazy::hash_t> order_;
  std::size_t parameters_ = 0;  // of all plans
};

}  // namespace torch_xla_donate
