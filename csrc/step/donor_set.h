// The donors of one step, from the proposal to the claim.
//
// The marked parameters are proposed first. Then features offer inputs that the program cannot reach. Marks of a buffer
// that another live tensor needs are refused. The planner chooses among the inputs and orders the rest. Then Commit()
// adds the donors to torch_xla's donor set and moves the marks to a new step of the registry. Refusals come before the
// order, so a refused donor neither moves a parameter nor changes the graph.
//
// torch_xla donates a parameter whose DeviceDataInfo names one of the step's outputs. A Claim replaces these infos, and
// restores them when the graph has been compiled, or when the claim ends.
//
// Ownership: a DonorSet lives inside RunPostOrder. The thread's step shares a Claim with a guard, which belongs to the
//   executor and then to the run. The guard ends the claim.
// Threads: belongs to one thread. The end of a run, on another thread, records its outcome and destroys the guard.
// Errors: if a function throws, for lack of memory, the step refuses its marks. It has changed at most the order of the
//   graph's parameters, which the graph's hash has, too.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "registry/marks.h"
#include "registry/steps.h"
#include "step/live_tensors.h"
#include "step/liveness.h"
#include "step/parameter_order.h"
#include "step/phases.h"
#include "step/planner.h"

namespace torch_xla_donate {

// Makes the next op on these tensors, or the next read, reach the hooks. Otherwise an op would use the tensor's graph
// node, and a read the host's copy of the value.
void ForgetCachedValues(const std::vector<std::shared_ptr<abi::TensorData>>& tensors) noexcept;

// Ends the marks among a graph's parameters, which no step will donate.
void RefuseMarks(const abi::Executor::PostOrderData& graph, const Reason& reason, bool notify);

class Claim {
 public:
  bool HasDonors() const { return step_ != nullptr; }
  bool IsCompiled() const { return compiled_; }
  void Compiled();
  // The step is about to run. The end of the run records its outcome.
  void Commit(RunContext& run, std::string graph_hash);
  // Claims the donors of a compiled graph, which were fixed when it was compiled, and commits them.
  void CommitCompiled(RunContext& run, const std::vector<Steps::Offer>& offers, std::string graph_hash);
  // For the report, which reads the executable's text on request.
  void NoteExecutable(const std::shared_ptr<const abi::HostCachedComputation>& executable) const {
    Steps::Get().NoteExecutable(step_, executable);
  }
  // The step will not run. Does nothing if the run has begun.
  void Abandon(const Reason& why) noexcept;

 private:
  friend class DonorSet;
  struct RewrittenInfo {
    lazy::BackendDataPtr buffer;
    std::shared_ptr<lazy::BackendData::Info> before;
  };
  void RestoreInfos() noexcept;

  StepPtr step_;                                   // null if the claim has only moved outputs
  std::shared_ptr<lazy::BackendData::Info> ours_;  // the note that replaces theirs
  std::vector<RewrittenInfo> rewritten_;
  MovedOutputs moved_;  // until the graph is compiled; then torch_xla keeps the outputs, also of a step that fails
  bool compiled_ = false;
  std::function<void()> on_success_;  // called after a successful run
};

class DonorSet {
 public:
  // `arena` is the executor's.
  DonorSet(GraphContext& context, const LiveTensorList& list, void* arena)
      : context_(context),
        list_(list),
        arena_(arena),
        marks_(Marks::Get().Among(context.graph->parameters_data)),
        refusals_(marks_.size()) {}

  const LiveTensorList& List() const { return list_; }
  void* Arena() const { return arena_; }
  // The live tensors, in the executor's order, null for those that are gone; then those made since.
  const std::vector<std::shared_ptr<abi::TensorData>>& Live();
  // The graph and its gate, which Live() closes if the outputs cannot be found among the live tensors.
  const GraphContext& Context() const { return context_; }
  // The facts for a plan, with the marks that are not refused. `reach` is empty if it is unknown, or not asked for.
  StepFacts Facts(const std::optional<Liveness>& reach);
  // The alias ids of the outputs; empty if they were not found.
  std::vector<std::int64_t> OutputIds();

  // Proposes unmarked inputs out of reach. Without a reach, the step only orders its donors.
  void OfferInputs(std::optional<Liveness> reach) {
    reach_ = std::move(reach);
    offers_inputs_ = true;
  }

  bool IsEmpty() const { return marks_.empty() && !offers_inputs_; }
  // Claims the donors. Returns whether the step needs the claim.
  bool Commit(Claim& claim);
  // Whether the registry has a step for the graph.
  bool IsRecorded() const { return recorded_; }

 private:
  // The result of the plan, before anything is changed.
  struct Donation {
    std::vector<Steps::Offer> offers;  // in the order of the parameters
    std::vector<bool> is_own;          // by offer: torch_xla donates it anyway, because an output replaces it
    std::optional<OutputMove> move;
    std::function<void()> on_success;
  };

  void FindOutputs();
  // Of an output that a mark prefers; nullopt for null, and for a tensor that is no output.
  std::optional<std::size_t> NumberOf(const abi::TensorData* output) const;
  void Triage();
  void Prepare();
  Donation Plan();
  void RewriteInfos(const Donation& donation, const StepPtr& step, Claim& claim) const noexcept;
  void EndDryRun(std::uint64_t step);

  GraphContext& context_;
  const LiveTensorList& list_;
  void* const arena_;
  std::vector<Marks::PendingMark> marks_;
  std::vector<Reason> refusals_;  // by mark; empty if it may be donated
  bool offers_inputs_ = false;
  std::optional<Liveness> reach_;
  bool prepared_ = false;
  std::vector<std::shared_ptr<abi::TensorData>> live_;
  std::vector<const abi::TensorData*> outputs_;
  // The outputs by the ids that mark the inputs which torch_xla donates; of several with one id, the first.
  ska::flat_hash_map<std::int64_t, std::size_t> place_of_id_;
  bool recorded_ = false;
};

}  // namespace torch_xla_donate
