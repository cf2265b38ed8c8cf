// The marks that donate_buffer() makes, and what became of each.
//
// A Donor is one marked buffer. It is pending until a step reads it; the step then claims it, and when the step has run
// the donor is donated or unusable. Marks live here and only here: device data carries no flag of ours.
//
// Ownership: donors are shared between this registry and the steps; they hold buffers and tensors weakly, so a mark
//   never keeps memory alive. The last kKeptSteps steps are kept for reports.
// Threads: every member may be called from any thread. One mutex guards all; it is never held while a step is awaited,
//   while the GIL is taken or while host code runs. pthread_atfork handlers keep it usable in a forked child.
// Errors: none of its own.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "registry/donor.h"

namespace torch_xla_donate {

class DonationRegistry {
 public:
  static constexpr std::size_t kKeptSteps = 8;
  static constexpr std::size_t kKeptOutcomes = 1024;

  // Never destroyed: hooks may run until the process ends.
  static DonationRegistry& Get();

  bool HasNotices() const noexcept { return has_notices_.load(std::memory_order_relaxed); }

  // A leaf ready to be marked: its buffer is materialised, not read-only.
  struct Leaf {
    std::shared_ptr<abi::TensorData> tensor;
    lazy::BackendDataPtr buffer;
    at::IntArrayRef sizes;
    at::ScalarType dtype;
    std::uint32_t index;
    std::shared_ptr<abi::TensorData> target;  // null without a wish
  };
  // The first leaf whose buffer a step has claimed, or their number. Does not wait.
  std::size_t FirstTracked(const std::vector<Leaf>& leaves) const;

  // Marks all leaves. A buffer that is marked already keeps its mark and gains the holder, if that is new; a later call
  // that asks for more (strict, a target) takes the place of an earlier one for the same tensor.
  void Mark(const std::vector<Leaf>& leaves, const std::shared_ptr<const CallSite>& site);

  // Takes the mark of each buffer back; returns how many were pending.
  std::size_t Cancel(const std::vector<lazy::BackendDataPtr>& buffers);

  // Takes back what is still pending of one call's marks. A buffer that another call has marked, too, stays marked.
  void CancelCall(const CallSite* site);
  // The same, but what is taken back has been unusable: for the reason of its leaf, or else for the general one.
  void EndCall(const CallSite* site, const std::unordered_map<std::uint32_t, Reason>& reasons, const Reason& reason,
               bool notify);
  // The leaves of a call that are still pending and whose buffers somebody else may hold, as far as reference counts
  // tell: too many is possible, too few is not.
  std::vector<std::uint32_t> PerhapsShared(const CallSite* site) const;
  // Waits until whatever is being started on the call's device has let its buffers go. The caller must not hold the
  // GIL.
  void WaitForHandOver(const CallSite* site) const;
  // Those whose buffers one of these tensors holds without having been marked.
  std::vector<std::uint32_t> SharedWith(const std::vector<std::shared_ptr<abi::TensorData>>& live,
                                        const CallSite* site) const;
  // The leaf of this call that marked the buffer, if that is still pending.
  std::optional<std::uint32_t> LeafOf(const lazy::BackendData* buffer, const CallSite* site) const;

  bool IsPending(const lazy::BackendData* buffer) const;

  // Whether a step has claimed the buffer and has not been found to leave it alone. Does not wait.
  bool IsTracked(const lazy::BackendData* buffer) const;

  // The same, but false already while the step runs if its graph did not use the buffer the last time. Does not wait.
  bool IsConsumed(const lazy::BackendData* buffer) const;

  // The donor and the step that consumed the buffer; null if nobody did. Waits for that step's end, which alone tells
  // for certain, so the caller must not hold the GIL or a host lock.
  std::pair<DonorPtr, std::uint64_t> FindConsumed(const lazy::BackendData* buffer);

  // --- Donors that a step would have consumed, had donation not been disabled ---

  // Their use is reported from now on, until they are marked anew or nobody holds them.
  void RememberWouldBeConsumed(const std::vector<DonorPtr>& donors, std::uint64_t step);
  // A copy of the spared donor, and the step that would have consumed it; null if there is none.
  std::pair<DonorPtr, std::uint64_t> FindWouldBeConsumed(const lazy::BackendData* buffer) const;
  // The step's spared donors may be used: it has failed, or is to be run again.
  void ForgetWouldBeConsumed(std::uint64_t step);

  // --- The life of a step, driven by the hooks ---

  // Forgets what can no longer be touched. A mark whose tensor lives on in another buffer is told as unusable. Once per
  // step; linear in what is remembered.
  void Sweep();

  // The pending donors among the parameters of a graph, with their positions: those meant for steps, or those of one
  // call. Nothing changes yet.
  std::vector<std::pair<std::size_t, DonorPtr>> PendingAmong(const std::vector<lazy::BackendDataPtr>& parameters,
                                                             const CallSite* call = nullptr) const;

  struct Refusal {
    DonorPtr donor;
    Reason reason;
    bool notify;  // false where the user has switched donation off and need not be told
  };
  // Moves donors from pending to a new step: asked of XLA, or refused, each with its reason.
  StepPtr Claim(std::vector<DonorPtr> asked, std::vector<Refusal> refused, bool after_backward_thread = false);

  // The step is about to run. If its graph has run before, outcomes are known from here on.
  void Commit(const StepPtr& step, std::string graph_hash, const std::vector<lazy::BackendDataPtr>& outputs);

  // The executable of a step that is about to run.
  void NoteExecutable(const StepPtr& step, const std::shared_ptr<const abi::HostCachedComputation>& executable);
  // A step that has read no marked buffer is about to run. Does not wait.
  void NotePlainStep() noexcept { plain_steps_.fetch_add(1, std::memory_order_relaxed); }

  // The step has run, or has failed on the way (then for the reason given). What XLA used is read from the buffers.
  void Settle(const StepPtr& step, const Reason& failure = {});

  // The step will not run: nothing was used.
  void Abandon(const StepPtr& step, const Reason& failure);

  // Automatic donation has left a step alone, for this reason.
  void NoteAutoRefusal(const Reason& reason);
  // A hook has gone on without donation, or without a check, after this error.
  void NoteError(const char* error);

  // --- For readers ---

  // How many steps automatic donation has left alone, by reason.
  std::map<Reason, std::uint64_t> AutoRefusals() const;
  // How often a hook has gone on after an error, by error.
  std::map<std::string, std::uint64_t> Errors() const;

  // How many steps without donors have run.
  std::uint64_t PlainSteps() const noexcept { return plain_steps_.load(std::memory_order_relaxed); }
  // The optimised HLO of a graph that has run with donors; nothing if torch_xla has dropped its executable.
  std::optional<std::string> GraphText(const std::string& graph_hash) const;

  // Waits until no step is on its way to the device any more. The caller must not hold the GIL.
  void WaitForSteps();
  std::vector<StepSnapshot> Steps() const;
  std::vector<Donor> Pending() const;

  // Unusable donations that nobody has been told of: their steps, of one device or of all.
  std::vector<StepSnapshot> TakeNotices(const std::optional<lazy::BackendDevice>& device);

  struct Counts {
    std::size_t pending, consumed, spared, steps, outcomes;
  };
  Counts Size() const;

 private:
  DonationRegistry();
  struct Consumed {
    DonorPtr donor;
    StepPtr step;
  };

  void Refresh();  // the watch word and the atomics, after a change
  void AddStep(const StepPtr& step);
  void Finish(const StepPtr& step, const std::vector<lazy::BackendDataPtr>& buffers, const std::vector<bool>& used,
              std::shared_ptr<const GraphOutcome> outcome, const Reason& failure);
  StepPtr ClaimLocked(std::vector<DonorPtr> asked, std::vector<Refusal> refused, bool after_backward_thread = false);
  std::vector<DonorPtr> TakeCall(const CallSite* site);
  StepSnapshot Snapshot(const Step& step) const;
  void ForgetConsumed();  // what can no longer be touched
  const Consumed* Lookup(const lazy::BackendData* buffer) const;

  mutable std::mutex mutex_;
  std::condition_variable settled_;
  std::atomic<bool> has_notices_{false};
  std::atomic<std::uint64_t> plain_steps_{0};
  std::uint64_t next_step_ = 1;
  std::size_t running_ = 0;
  ska::flat_hash_map<const lazy::BackendData*, DonorPtr> pending_;
  ska::flat_hash_map<const lazy::BackendData*, Consumed> consumed_;
  std::size_t remembered_ = 0;  // how many of these the last ForgetConsumed() has left
  ska::flat_hash_map<const lazy::BackendData*, std::pair<DonorPtr, std::uint64_t>> spared_;
  std::deque<StepPtr> steps_;
  std::deque<StepPtr> notices_;
  std::unordered_map<std::string, std::shared_ptr<const GraphOutcome>> outcomes_;
  std::deque<std::string> outcome_order_;
  std::map<Reason, std::uint64_t> auto_refusals_;
  std::map<std::string, std::uint64_t> errors_;
};

}  // namespace torch_xla_donate
