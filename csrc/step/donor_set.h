// The donors of one step, from the proposal to the claim.
//
// Features propose marked parameters, and inputs that the program cannot reach. Commit() refuses donors whose buffer
// another live tensor needs. The planner chooses among the inputs and orders the rest. Then Commit() adds the donors to
// torch_xla's donor set and moves the marks to a new step of the registry. Refusals come before the order, so a refused
// donor neither moves a parameter nor changes the graph.
//
// torch_xla donates a parameter whose DeviceDataInfo names one of the step's outputs. A Claim replaces these infos, and
// restores them when the graph has been compiled, or when the claim ends.
//
// Ownership: a DonorSet lives inside RunPostOrder. The thread's step, the guard on the executor's stack and the run
//   share a Claim. The last of them restores infos and releases arrays.
// Threads: belongs to one thread. The end of a run, on another thread, only settles the step.
// Errors: if the planner fails, the marks are donated in the order of the graph. If Commit() throws, for lack of
// memory,
//   it has changed at most the order of the graph's parameters, which the graph's hash has, too.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "features/donor_plans.h"
#include "features/liveness.h"
#include "registry/registry.h"
#include "step/live_tensors.h"
#include "step/observer.h"
#include "step/parameter_order.h"

namespace torch_xla_donate {

using LiveTensors = LiveTensorList<abi::TensorData, lazy::BackendData>;

// Makes the next op on these tensors, or the next read, reach the hooks. Otherwise an op would use the tensor's graph
// node, and a read the host's copy of the value.
void ForgetCachedValues(const std::vector<std::shared_ptr<abi::TensorData>>& tensors) noexcept;

class Claim {
 public:
  Claim() = default;
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  bool HasDonors() const { return step_ != nullptr; }
  bool IsCompiled() const { return compiled_; }
  void Compiled();
  void Scheduled() { moved_.clear(); }  // from here on torch_xla keeps the outputs
  // The step is about to run. The end of the run records its outcome.
  void Commit(RunContext& run, std::string graph_hash);
  // Claims the donors of a compiled graph, which were fixed when it was compiled, and commits them.
  void CommitCompiled(RunContext& run, const std::vector<DonationRegistry::Offer>& offers, std::string graph_hash);
  // For the report, which reads the executable's text on request.
  void NoteExecutable(const abi::Executor::Async& run) const;
  // The step will not run. Does nothing if the run has begun.
  void Abandon(const Reason& why) noexcept;

 private:
  friend class DonorSet;
  struct RewrittenInfo {
    lazy::BackendDataPtr buffer;
    std::shared_ptr<lazy::BackendData::Info> ours, before;
  };
  void RestoreInfos() noexcept;

  StepPtr step_;  // null if the claim has only moved outputs
  std::vector<RewrittenInfo> rewritten_;
  MovedOutputs moved_;  // until the step is scheduled
  bool compiled_ = false;
  std::function<void()> settled_;  // called after a successful run
};

class DonorSet {
 public:
  DonorSet(GraphContext& context, const LiveTensors& list) : context_(context), list_(list) {}

  const GraphContext& Context() const { return context_; }
  const LiveTensors& List() const { return list_; }
  // The live tensors, in the executor's order. Known when Commit() begins.
  const std::vector<std::shared_ptr<abi::TensorData>>& Live() const { return live_; }

  using PendingMark = DonationRegistry::PendingMark;
  // Proposes a marked parameter.
  void Propose(PendingMark mark) { proposed_.push_back({std::move(mark), {}}); }
  // Proposes unmarked inputs. If the step donates, `find` returns those that the program can reach, nullopt if unknown.
  using FindReach = std::function<std::optional<Liveness>(const DonorSet&)>;
  // `settled` is called after the run with the planner's answer and its donors.
  using Settled = std::function<void(const PlanResult&, const std::vector<DonorPtr>&)>;
  void OfferInputs(FindReach find, Settled settled) {
    find_reach_ = std::move(find);
    settled_ = std::move(settled);
  }

  // `note` gets the request that automatic donation would make. It changes nothing in the step.
  using Note = std::function<void(const PlanRequest&, const std::vector<std::int64_t>& outputs, const Reason&)>;
  void WatchInputs(FindReach find, Note note) {
    find_watched_ = std::move(find);
    note_ = std::move(note);
  }

  bool IsEmpty() const { return proposed_.empty() && !find_reach_ && !note_; }
  // Claims the donors. Returns whether the step needs the claim.
  bool Commit(Claim& claim);
  // Whether the registry has a step for the graph.
  bool IsRecorded() const { return recorded_; }

 private:
  struct Proposed {
    PendingMark mark;
    Reason refusal;  // empty if it may be donated
  };
  using Offer = DonationRegistry::Offer;
  // The result of the plan, before anything is changed.
  struct Donation {
    std::vector<Offer> offers;  // in the order of the parameters
    std::optional<OutputMove> move;
    std::function<void()> settled;
  };

  void FindOutputs();
  void Triage();
  PlanRequest Request(const std::vector<PendingMark>& marks, const std::optional<Liveness>& reach) const;
  Donation Plan(const std::vector<PendingMark>& marks) const;
  void Watch(const std::vector<PendingMark>& marks) const;
  void EndDryRun(const std::vector<PendingMark>& marks, std::uint64_t step) const;

  GraphContext& context_;
  const LiveTensors& list_;
  std::vector<Proposed> proposed_;
  FindReach find_reach_;
  Settled settled_;
  FindReach find_watched_;
  Note note_;
  std::vector<std::shared_ptr<abi::TensorData>> live_;
  std::vector<const abi::TensorData*> outputs_;
  std::unordered_map<const abi::TensorData*, std::size_t> number_of_;  // of each output
  abi::OutputIds ids_;                                                 // of the outputs
  bool recorded_ = false;
};

}  // namespace torch_xla_donate
