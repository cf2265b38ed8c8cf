// The donors of one step, from the proposal to the claim.
//
// Features propose marked parameters, and inputs out of the program's reach. Commit() then refuses what another live
// tensor would miss, lets the planner choose among the inputs and order what is left, puts the donors into torch_xla's
// donor set and moves the marks to a new step of the registry. Refusals come before the order: a refused donor neither
// moves a parameter nor makes another graph.
//
// torch_xla donates a parameter whose DeviceDataInfo names one of the step's outputs. A Claim holds the infos that were
// replaced for that, and gives them back when the graph has been compiled, whatever happens later.
//
// Ownership: a DonorSet lives inside RunPostOrder. A Claim is shared by the thread's step, the guard on the executor's
//   stack and the run; the last of them gives infos and arrays back.
// Threads: belong to one thread; the end of a run, on another one, only settles the step.
// Errors: Commit() throws nothing of its own; a planner that fails leaves the marks without an order.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
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

// An op on the donor, or a read, has to come to the hooks from here on: an op would otherwise go on with the graph node
// that the tensor has, and a read with the host's copy of the value.
void ForgetCachedValues(const Donor& donor);

class Claim {
 public:
  Claim() = default;
  // Of a compiled graph, whose donors were fixed when it was compiled.
  explicit Claim(StepPtr step) : step_(std::move(step)), compiled_(true) {}
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  bool HasDonors() const { return step_ != nullptr; }
  bool IsCompiled() const { return compiled_; }
  void Compiled();
  void Scheduled() { moved_.clear(); }  // torch_xla keeps the outputs from here on
  // The step is about to run; the end of the run settles it.
  void Commit(RunContext& run, std::string graph_hash);
  // For the report, which reads the executable's text when the program asks for it.
  void NoteExecutable(const abi::Executor::Async& run) const;
  // It will not run. Nothing happens once it has begun to.
  void Abandon(const Reason& why);

 private:
  friend class DonorSet;
  struct RewrittenInfo {
    lazy::BackendDataPtr buffer;
    std::shared_ptr<lazy::BackendData::Info> ours, before;
  };
  void GiveInfosBack();

  StepPtr step_;  // null if it has no donors of ours, and outputs have moved
  std::vector<RewrittenInfo> rewritten_;
  MovedOutputs moved_;  // until the step is scheduled
  bool compiled_ = false;
  std::function<void()> settled_;  // called when the step has run
};

class DonorSet {
 public:
  DonorSet(GraphContext& context, const LiveTensors& list) : context_(context), list_(list) {}

  const GraphContext& Context() const { return context_; }
  const LiveTensors& List() const { return list_; }
  // The live tensors, in the executor's order, and those that will hold the outputs; known when Commit() begins.
  const std::vector<std::shared_ptr<abi::TensorData>>& Live() const { return live_; }

  // A parameter is marked.
  void Ask(lazy::BackendDataPtr buffer, DonorPtr donor) { asked_.push_back({std::move(buffer), std::move(donor), {}}); }
  // Inputs may become donors. `find` tells which of them the program can reach, if that can be told; it is called when
  // the step donates.
  using FindReach = std::function<std::optional<Liveness>(const DonorSet&)>;
  // `settled` is called with the planner's answer and its donors when the step has run.
  using Settled = std::function<void(const PlanResult&, const std::vector<DonorPtr>&)>;
  void OfferInputs(FindReach find, Settled settled) {
    find_reach_ = std::move(find);
    settled_ = std::move(settled);
  }

  // The claim, if the step has to be followed to its end.
  std::shared_ptr<Claim> Commit();
  // Whether the registry has a step for it.
  bool IsRecorded() const { return recorded_; }

 private:
  struct Asked {
    lazy::BackendDataPtr buffer;
    DonorPtr donor;
    Reason refusal;  // empty: may be donated
  };
  using DonorsByBuffer = ska::flat_hash_map<const lazy::BackendData*, DonorPtr>;

  void FindOutputs();
  void Triage();
  PlanRequest Request(const DonorsByBuffer& donor_of, const std::optional<Liveness>& reach) const;
  std::vector<DonorPtr> Plan(const std::vector<DonorPtr>& marks, Claim& claim);
  void Rewrite(const std::vector<DonorPtr>& donors, Claim& claim) const;
  void EndDryRun(const std::vector<DonorPtr>& donors, std::uint64_t step) const;

  GraphContext& context_;
  const LiveTensors& list_;
  std::vector<Asked> asked_;
  FindReach find_reach_;
  Settled settled_;
  std::vector<std::shared_ptr<abi::TensorData>> live_;
  std::vector<const abi::TensorData*> outputs_;
  abi::OutputIds ids_;  // of the outputs
  bool recorded_ = false;
};

}  // namespace torch_xla_donate
