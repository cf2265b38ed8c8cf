// The marks that donate_buffer() makes, and their outcomes.
//
// A Donor is one marked buffer. It is pending until a step reads and claims it. After the step it is donated or
// unusable. Only the registry holds marks: device data carries no flag of ours.
//
// Ownership: the registry and the steps share the donors, which hold buffers and tensors weakly, so a mark never keeps
//   memory alive. Reports can read the last steps, 8 unless SetKeptSteps() says otherwise.
// Threads: any thread may call any member. One mutex guards everything. No member holds it while it waits for a step,
//   takes the GIL or runs host code. pthread_atfork handlers keep it usable in a forked child.
// Errors: throws none itself.
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
  static constexpr std::size_t kKeptOutcomes = 1024;

  // Never destroyed: hooks may run until the process ends.
  static DonationRegistry& Get();

  bool HasNotices() const noexcept { return has_notices_.load(std::memory_order_relaxed); }

  // A leaf ready to be marked. Its buffer is materialised and not read-only.
  struct Leaf {
    std::shared_ptr<abi::TensorData> tensor;
    lazy::BackendDataPtr buffer;
    at::IntArrayRef sizes;
    at::ScalarType dtype;
    std::uint32_t index;
    std::shared_ptr<abi::TensorData> target;  // null if not requested
  };
  // Returns the index of the first leaf whose buffer a step has claimed, or the number of leaves. Does not wait.
  std::size_t FirstTracked(const std::vector<Leaf>& leaves) const;

  // Marks all leaves. A marked buffer keeps its mark, and gains a holder if the tensor is new, or if the call requests
  // more for it: a target, or to be stricter.
  void Mark(const std::vector<Leaf>& leaves, const std::shared_ptr<const CallSite>& site);

  // Cancels the mark of each buffer; returns how many were pending.
  std::size_t Cancel(const std::vector<lazy::BackendDataPtr>& buffers);

  // Cancels the pending marks of one call. A buffer that another call has also marked stays marked.
  void CancelCall(const CallSite* site);
  // Ends the pending marks of one call as unusable, for the reason of the leaf or else the general one.
  void EndCall(const CallSite* site, const std::unordered_map<std::uint32_t, Reason>& reasons, const Reason& reason,
               bool notify);
  // Returns the call's pending leaves whose buffers may have another holder, judged by reference counts. The result may
  // have too many leaves, never too few.
  std::vector<std::uint32_t> PerhapsShared(const CallSite* site) const;
  // Waits until a run that is starting on the call's device has released its buffers. The caller must not hold the GIL.
  void WaitForHandOver(const CallSite* site) const;
  // Returns the call's leaves whose buffers one of these tensors holds without a mark.
  std::vector<std::uint32_t> SharedWith(const std::vector<std::shared_ptr<abi::TensorData>>& live,
                                        const CallSite* site) const;
  // The leaf of this call that marked the buffer, if the mark is still pending.
  std::optional<std::uint32_t> LeafOf(const lazy::BackendData* buffer, const CallSite* site) const;

  bool IsPending(const lazy::BackendData* buffer) const;
  // Whether a mark is pending on the device; null for any.
  bool HasPending(const lazy::BackendDevice* device) const;

  // Whether a step has claimed the buffer and is not known to have left it unused. Does not wait.
  bool IsTracked(const lazy::BackendData* buffer) const;

  // The same, but false during the step if the graph did not use the buffer in its last run. Does not wait.
  bool IsConsumed(const lazy::BackendData* buffer) const;

  // Returns the donor and the step that consumed the buffer, or null. Waits for that step to end, because only then the
  // outcome is certain. The caller must not hold the GIL or a host lock.
  std::pair<DonorPtr, std::uint64_t> FindConsumed(const lazy::BackendData* buffer);

  // --- Donors that a step would have consumed if donation were enabled ---

  // From now on their uses are reported, until they are marked again or freed.
  void RememberWouldBeConsumed(const std::vector<DonorPtr>& donors, std::uint64_t step);
  // A copy of the donor, and the step that would have consumed it; null if there is none.
  std::pair<DonorPtr, std::uint64_t> FindWouldBeConsumed(const lazy::BackendData* buffer) const;
  // The program may use the step's donors, because the step failed or will run again.
  void ForgetWouldBeConsumed(std::uint64_t step);

  // --- The life of a step, driven by the hooks ---

  // Forgets freed buffers. A mark becomes unusable if its tensor now holds another buffer because it was sharded.
  // Called once per step; linear in the number of entries.
  void Sweep();

  // The pending donors among a graph's parameters, with their positions; without a call, those meant for steps.
  std::vector<std::pair<std::size_t, DonorPtr>> PendingAmong(const std::vector<lazy::BackendDataPtr>& parameters,
                                                             const CallSite* call = nullptr) const;

  struct Refusal {
    DonorPtr donor;
    Reason reason;
    bool notify;  // false if the user has disabled donation
  };
  // Moves donors from pending to a new step. They are offered to XLA, or refused with a reason each.
  StepPtr Claim(std::vector<DonorPtr> asked, std::vector<Refusal> refused, bool after_backward_thread = false);

  // The step is about to run. If its graph has run before, the outcomes are known now.
  void Commit(const StepPtr& step, std::string graph_hash, const std::vector<lazy::BackendDataPtr>& outputs);

  // The executable of a step that is about to run.
  void NoteExecutable(const StepPtr& step, const std::shared_ptr<const abi::HostCachedComputation>& executable);
  // A run that reads no marked buffer is about to begin: a step, or a read such as print(). Adds the graphs that
  // torch_xla has compiled since the run before to this step; for a read to the step before. A step with donors adds
  // them at Commit(). Those before the first step with donors count for that step.
  void NoteRun(bool is_step) {
    if (has_steps_.load(std::memory_order_relaxed)) {
      CountRun(is_step);
    }
  }

  // The step has run, or has failed for the reason given. Reads from the buffers whether XLA used them.
  void Settle(const StepPtr& step, const Reason& failure = {});

  // The step will not run, so XLA used no donor.
  void Abandon(const StepPtr& step, const Reason& failure);

  // Automatic donation has skipped a step for this reason.
  void NoteAutoRefusal(const Reason& reason);
  // A hook has continued without donation, or without a check, after this error.
  void NoteError(const char* error);

  // --- For readers ---

  // From now on keeps so many steps, at least one.
  void SetKeptSteps(std::size_t count);
  // Of an unusable donor. Calls from now on keep this size.
  void SetWarnMinBytes(std::int64_t bytes) { warn_min_bytes_.store(bytes, std::memory_order_relaxed); }
  std::int64_t WarnMinBytes() const noexcept { return warn_min_bytes_.load(std::memory_order_relaxed); }

  // Counts the steps that begin from now on, until it is closed. The outcomes of those steps are added later, too.
  void Open(const std::shared_ptr<StepTally>& tally);
  void Close(const std::shared_ptr<StepTally>& tally);
  // A copy that readers use without the lock, and the steps that it keeps.
  std::pair<StepTally, std::vector<StepSnapshot>> Read(const StepTally& tally) const;

  std::map<Reason, std::uint64_t> AutoRefusals() const;
  std::map<std::string, std::uint64_t> Errors() const;

  // The optimised HLO of a graph that has run with donors; nullopt if torch_xla has dropped its executable.
  std::optional<std::string> GraphText(const std::string& graph_hash) const;

  // Waits until every step has ended. The caller must not hold the GIL.
  void WaitForSteps();
  std::vector<StepSnapshot> Steps() const;
  std::vector<Donor> Pending() const;

  // Returns and clears the steps with unusable donations that were not reported yet, of one device or of all.
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

  void Refresh();  // updates the watch word and the atomics after a change
  void AddStep(const StepPtr& step);
  void Finish(const StepPtr& step, const std::vector<lazy::BackendDataPtr>& buffers, const std::vector<bool>& used,
              std::shared_ptr<const GraphOutcome> outcome, const Reason& failure);
  StepPtr ClaimLocked(std::vector<DonorPtr> asked, std::vector<Refusal> refused, bool after_backward_thread = false);
  std::vector<DonorPtr> TakeCall(const CallSite* site);
  StepSnapshot Snapshot(const Step& step) const;
  void CountRun(bool is_step);
  void AddCompilations(std::uint64_t& counter);
  void ForgetConsumed();  // removes the entries of freed buffers
  const Consumed* Lookup(const lazy::BackendData* buffer) const;

  mutable std::mutex mutex_;
  std::condition_variable settled_;
  std::atomic<bool> has_notices_{false};
  std::atomic<bool> has_steps_{false};
  std::atomic<std::int64_t> warn_min_bytes_{0};
  std::uint64_t next_step_ = 1;
  std::size_t running_ = 0;
  ska::flat_hash_map<const lazy::BackendData*, DonorPtr> pending_;
  ska::flat_hash_map<const lazy::BackendData*, Consumed> consumed_;
  std::size_t remembered_ = 0;  // the size of consumed_ after the last ForgetConsumed()
  ska::flat_hash_map<const lazy::BackendData*, std::pair<DonorPtr, std::uint64_t>> spared_;
  std::size_t kept_steps_ = 8;
  std::deque<StepPtr> steps_;
  StepPtr last_claimed_;
  std::uint64_t compilations_;                       // graphs that the steps until now count
  std::vector<std::shared_ptr<StepTally>> tallies_;  // the open ones
  std::deque<StepPtr> notices_;
  std::unordered_map<std::string, std::shared_ptr<const GraphOutcome>> outcomes_;
  std::deque<std::string> outcome_order_;
  std::map<Reason, std::uint64_t> auto_refusals_;
  std::map<std::string, std::uint64_t> errors_;
};

}  // namespace torch_xla_donate
