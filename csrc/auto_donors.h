// Donors that nobody has marked: inputs of a step that nothing can read again once its graph has run.
//
// At a step barrier the executor lists every live tensor of the device, and each pending graph belongs to one of them.
// So a parameter that no live tensor holds, by its data or by a graph that the step leaves pending, is out of reach for
// the program. Reference counts of buffers are not asked: what earlier runs still hold flips with their timing, and
// each flip would be another graph. (Those of an outdated tensor's old value are: one that is too high keeps the
// input.)
//
// Which of the dead parameters are asked for is decided once for each graph and dead set: as many of each size as there
// are outputs that no other donor takes, each close to the output that is made of it. A loop whose dead set flips (the
// garbage collector frees a cycle at odd times) is held to kMaxChoices graphs, and to the choice that fits from then
// on.
//
// Ownership: a Liveness belongs to one step. The plans live as long as the process, the last kKeptPlans of them, or the
// last ones that have kKeptParameters together: a plan takes some hundred bytes for each.
// Threads: AutoPlans is guarded by a mutex of its own; Liveness belongs to one thread.
// Errors: none of its own.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "donation_registry.h"
#include "torch_xla_abi.h"

namespace torch_xla_donate {

// Which parameters of a graph somebody can still reach.
class Liveness {
 public:
  explicit Liveness(const std::vector<lazy::BackendDataPtr>& parameters);

  // Somebody holds the buffer, whichever it is.
  void Hold(const lazy::BackendData* buffer);
  // Somebody may still run the graph, and read what it reads.
  void HoldGraph(const lazy::Value& root);
  // By position of the parameter: what Hold() was called with, and what only a graph reads.
  const std::vector<bool>& Held() const { return held_; }
  const std::vector<bool>& Read() const { return read_; }

 private:
  ska::flat_hash_map<const lazy::BackendData*, std::size_t> position_of_;
  std::vector<bool> held_, read_;
  std::unordered_set<const lazy::Node*> seen_;
};

// Tensors that have been found out of date once: caches that are written slice by slice, most often, and will be again.
//
// A view that is taken of such a tensor starts from the old value, and takes the new one when it is used. So where the
// old value has been donated, the tensor must have its new one before.
class OutdatedTensors {
 public:
  // Never destroyed: hooks may run until the process ends.
  static OutdatedTensors& Get();

  // Remembers the tensor, which must be one of this device, if it is out of date now. Those of others may belong to a
  // thread that is using them.
  void Remember(const at::Tensor& tensor, const lazy::BackendDevice& device);
  // The old values on a device, which nobody can read; `holders` as for abi::OutdatedValue.
  std::unordered_set<const abi::TensorData*> Values(const lazy::BackendDevice& device, long holders);
  // The tensors of a device take their new values.
  void BringUpToDate(const lazy::BackendDevice& device);
  // The one that keeps this old value takes its new one, whose buffer is returned. Null if there is none.
  lazy::BackendDataPtr Renew(const abi::TensorData& old_value);
  std::size_t Size() const;

 private:
  // What a tensor that is known carries, and takes along when it is destroyed or becomes another one. No weak pointer:
  // torch.utils.swap_tensors refuses a tensor that has one, and it would keep what the tensor holds.
  struct Tag : c10::BackendMeta {
    explicit Tag(const c10::TensorImpl* owner) : tensor(owner) {}
    ~Tag() override { Get().Forget(tensor); }
    // Whatever is made of the tensor is not known.
    c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override;

    const c10::TensorImpl* tensor;
  };
  struct Known {
    c10::TensorImpl* tensor;
    lazy::BackendDevice device;
  };
  std::vector<c10::intrusive_ptr<c10::TensorImpl>> Alive(const lazy::BackendDevice& device) const;
  void Forget(const c10::TensorImpl* tensor);

  mutable std::mutex mutex_;  // nobody who has it lets go of a tensor
  std::atomic<std::size_t> count_{0};
  std::vector<Known> tensors_;
};

// Keeps searches to a share of the time that goes by: a small one, unless they find something, which saves the copies
// of a cache. What a search takes is the thread's own time, which does not depend on what else the machine does.
class SearchBudget {
 public:
  static constexpr std::int64_t kPause = 20, kPauseOfFinder = 3;  // times what the search has taken

  bool Allows() const;
  // Runs the search, and returns what it does.
  bool Charge(const std::function<bool()>& search);

 private:
  std::atomic<std::int64_t> next_{0};  // nanoseconds of the steady clock
};

// What a step looks like to whoever chooses its automatic donors.
struct AutoQuestion {
  const abi::Executor::PostOrderData& graph;
  const std::vector<lazy::Value>& roots;
  const lazy::BackendDevice& device;
  lazy::hash_t hash;  // of the graph without its donors
  bool sharded;       // SPMD: what the compiler shards is not known before
  bool orders;        // whether the order of the parameters may be chosen, too
  // By position of the parameter:
  std::vector<bool> held;                                   // by a live tensor
  std::vector<bool> read_later;                             // by work that stays pending
  std::vector<bool> barred;                                 // not to be donated, whoever holds it
  std::vector<bool> donors;                                 // is a donor without being asked for here
  std::vector<std::optional<std::size_t>> output_replaced;  // by such a donor, where that is known
};

// The parameters to ask for.
struct AutoChoice {
  std::vector<std::size_t> parameters;
  std::vector<DonorPtr> prototypes;  // what the report will say of each; without a buffer
  std::vector<std::size_t> order;    // the parameters to put first, so that XLA pairs each with its output; or empty
  std::int64_t bytes = 0;
  std::vector<std::int64_t> room;  // sizes of outputs that are left without a donor
};

// An input that an output could have taken over, had nobody held it.
struct HeldInput {
  std::string array;  // "f32[8,4]"
  std::int64_t bytes;
  lazy::BackendDevice device;
  bool by_tensor;  // held by a live tensor; otherwise by work that stays pending
};

// It may pay to look for tensors that hold these inputs without a need: among the youngest of Python's objects, the
// less young, and all, each where the one before has been in vain.
struct AutoSearch {
  static constexpr std::size_t kStages = 3;
  lazy::hash_t plan;
  std::vector<bool> held;  // by position of the parameter
  std::size_t stage;       // to begin with
};

struct AutoAnswer {
  std::shared_ptr<const AutoChoice> choice;
  lazy::hash_t plan;
  std::optional<AutoSearch> search;
};

class AutoPlans {
 public:
  static constexpr std::size_t kMaxChoices = 4;
  static constexpr std::size_t kKeptPlans = 1024, kKeptParameters = 1 << 18;
  static constexpr std::size_t kFirstPause = 1, kPauseGrowth = 4;  // in steps of one graph that hold something

  // Never destroyed: hooks may run until the process ends.
  static AutoPlans& Get();

  // The choice is never null. Linear in the parameters; a dead set that this graph has not been seen with costs more.
  AutoAnswer Choose(const AutoQuestion& question);
  // What a search that Choose() has asked for has come to: its stage is the one that has found something or that there
  // was no time for, or kStages.
  void Searched(const AutoSearch& search, bool found);

  // The compiler has had no use for these parameters: the graph does not ask for them again.
  void OfNoUse(lazy::hash_t plan, const std::vector<std::size_t>& parameters);

  // Of the last step of each device; nothing of one that has not come to Choose(). A step begins with BeginStep().
  std::vector<HeldInput> LastHeld() const;
  void BeginStep(const lazy::BackendDevice& device);

  std::size_t Size() const;

 private:
  using ChoicePtr = std::shared_ptr<const AutoChoice>;
  struct Plan {
    std::shared_ptr<const std::vector<std::string>> arrays;       // the parameters, as abi::DescribeBuffer writes them
    std::vector<std::optional<std::int64_t>> bytes;               // of a parameter; nothing if it cannot be told
    std::vector<std::optional<std::int64_t>> output_bytes;        // the same for outputs
    std::vector<bool> fits;                                       // an output of this size is free
    std::deque<std::pair<std::vector<bool>, ChoicePtr>> by_dead;  // answers given, newest first
    std::vector<ChoicePtr> choices;                               // distinct; each may be a compiled graph
    std::vector<bool> always_dead;
    // When to search next. All stages take long, so for what they have not helped they are repeated ever more seldom.
    // What is held and has not been, as a cache that takes the place of an earlier one, is searched for at once.
    std::vector<std::uint8_t> in_vain;  // by position of the parameter: how many stages
    std::size_t wait = 0, pause = kFirstPause;
    bool has_helped = false;  // the last search: what nobody holds any more at the next step has not been in vain
  };

  void Forget(lazy::hash_t key);
  static Plan Look(const AutoQuestion& question);
  static ChoicePtr Decide(const Plan& plan, const AutoQuestion& question, const std::vector<bool>& dead);
  static ChoicePtr Settle(Plan& plan, const AutoQuestion& question, const std::vector<bool>& dead);

  // What a step has left alone, without the texts.
  struct Left {
    std::shared_ptr<const std::vector<std::string>> arrays;
    ChoicePtr choice;
    std::vector<std::size_t> held, read_later;  // parameters
  };

  mutable std::mutex mutex_;
  std::map<lazy::BackendDevice, Left> last_left_;
  std::unordered_map<lazy::hash_t, Plan, lazy::HashReducer> plans_;
  std::deque<lazy::hash_t> order_;
  std::size_t parameters_ = 0;  // of all plans
};

}  // namespace torch_xla_donate
