// The marks that donate_buffer() makes, and their outcomes.
//
// A Donor is one marked buffer. It is pending until a step reads and claims it. After the step it is donated or
// unusable. Only the registry holds marks: device data carries no flag of ours.
//
// Ownership: the registry and the steps share the donors, which hold buffers and tensors weakly, so a mark never keeps
//   memory alive. Reports can read the last steps, 8 unless SetKeptSteps() says otherwise.
// Threads: any thread may call any member. registry_mutex guards everything. No member holds it while it waits for a
//   step, takes the GIL or runs a graph. pthread_atfork handlers keep it usable in a forked child.
// Errors: only std::bad_alloc. A member that throws it has changed nothing. The end of a step throws nothing, as
//   threads wait for it: without memory, the report misses the step, and says so.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
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

  // Marks all leaves. A buffer that is marked already gains a mark if the tensor is new, or if the call requests more
  // for it: a target, or to be stricter.
  void AddMarks(const std::vector<Leaf>& leaves, const std::shared_ptr<const CallSite>& site);

  // Cancels the marks of these buffers. If a step has consumed one of them, or a call is about to, cancels none and
  // returns its position.
  std::optional<std::size_t> Cancel(const std::vector<lazy::BackendDataPtr>& buffers);
  // The same for those whose marks are pending.
  void CancelPending(const std::vector<lazy::BackendDataPtr>& buffers);

  // A compiled function has marked its arguments. Until its call ends or is cancelled, all runs of this thread are one
  // step, together with the arguments that they have not read.
  void BeginCall(const std::shared_ptr<const CallSite>& site);
  // Cancels the pending marks of one call. A buffer that another call has also marked stays marked.
  void CancelCall(const CallSite* site) noexcept;
  // Ends the pending marks of one call as unusable, for the reason of the leaf or else the general one. They join the
  // last step that the call's runs have claimed, also if it still runs.
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

  // A donor, and the number of the step that has consumed it.
  struct ConsumedDonor {
    DonorSnapshot donor;
    std::uint64_t step;
  };
  // Returns nullopt if no step has consumed the buffer. Waits for the step to end, because only then the outcome is
  // certain. The caller must not hold the GIL or a host lock.
  std::optional<ConsumedDonor> FindConsumed(const lazy::BackendData* buffer);

  // --- Donors that a step would have consumed if donation were enabled ---

  // From now on their uses are reported, until they are marked again or freed.
  void NoteUndonated(const std::vector<DonorPtr>& donors, std::uint64_t step);
  // Returns nullopt if no step would have consumed the buffer.
  std::optional<ConsumedDonor> FindUndonated(const lazy::BackendData* buffer) const;
  // The program may use the step's donors, because the step failed or will run again.
  void ForgetUndonated(std::uint64_t step);

  // --- The life of a step, driven by the hooks ---

  // Forgets freed buffers. A mark becomes unusable if its tensor now holds another buffer because it was sharded.
  // Called once per step; linear in the number of entries.
  void Sweep();

  // A marked parameter of a graph, and the tensors that its marks name.
  struct PendingMark {
    std::size_t position;
    DonorPtr donor;
    c10::SmallVector<std::shared_ptr<abi::TensorData>, 1> tensors;
    std::shared_ptr<abi::TensorData> target;  // the output that should take the buffer, or null
  };
  // The pending marks among a graph's parameters; without a call, those meant for steps.
  std::vector<PendingMark> PendingAmong(const std::vector<lazy::BackendDataPtr>& parameters,
                                        const CallSite* call = nullptr) const;
  // The tensors that hold the donors' buffers, by their marks.
  std::vector<std::shared_ptr<abi::TensorData>> TensorsOf(const std::vector<DonorPtr>& donors) const;

  // Keeps the call's marks of these buffers from being cancelled until Disarm(). Returns whether all are pending; if
  // not, it keeps none.
  bool Arm(const std::vector<lazy::BackendDataPtr>& buffers, const CallSite* call);
  void Disarm(const std::vector<lazy::BackendDataPtr>& buffers) noexcept;

  // A donor that a step offers to XLA, with its places in the step's graph.
  struct Offer {
    DonorPtr donor;
    std::optional<std::size_t> parameter = std::nullopt, successor = std::nullopt, requested = std::nullopt;
  };
  struct Refusal {
    DonorPtr donor;
    Reason reason;
    bool notify;  // false if the user has disabled donation
  };
  // Moves donors from pending to a new step. They are offered to XLA, or refused with a reason each. Skips marks that
  // another thread has cancelled meanwhile; so only the step's own list says which donors it has.
  struct Claimed {
    StepPtr step;                                           // null if no donor is left
    std::vector<std::shared_ptr<abi::TensorData>> tensors;  // that hold the donors offered, by their marks
  };
  Claimed Claim(const std::vector<Offer>& offers, std::vector<Refusal> refused, bool after_backward_thread = false);

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
  void RecordOutcome(const StepPtr& step, const Reason& failure = {}) noexcept;

  // Whether the donor's step has ended without using it.
  bool IsUnusable(const Donor& donor) const;

  // The step will not run, so XLA used no donor.
  void Abandon(const StepPtr& step, const Reason& failure) noexcept;

  // Automatic donation has skipped a step for this reason.
  void NoteAutoRefusal(const Reason& reason) noexcept;
  // A hook has continued without donation, or without a check, after this error.
  void NoteError(const char* error) noexcept;

  // --- For readers ---

  // From now on keeps so many steps, at least one.
  void SetKeptSteps(std::size_t count);
  // Of an unusable donor. Calls from now on keep this size.
  void SetWarnMinBytes(std::int64_t bytes) { warn_min_bytes_.store(bytes, std::memory_order_relaxed); }
  std::int64_t WarnMinBytes() const noexcept { return warn_min_bytes_.load(std::memory_order_relaxed); }

  // Counts the steps that begin from now on, until it is closed. The outcomes of those steps are added later, too.
  void Open(const std::shared_ptr<StepTally>& tally, bool all_threads);
  void Close(const std::shared_ptr<StepTally>& tally);
  // A copy that readers use without the lock, and the steps that it keeps.
  std::pair<TallyCounts, std::vector<StepSnapshot>> Read(const StepTally& tally) const;

  std::map<Reason, std::uint64_t> AutoRefusals() const;
  std::map<std::string, std::uint64_t> Errors() const;

  // The optimised HLO of a graph that has run with donors; nullopt if torch_xla has dropped its executable.
  std::optional<std::string> GraphText(const std::string& graph_hash) const;

  // Waits until every step has ended. The caller must not hold the GIL.
  void WaitForSteps();
  std::vector<StepSnapshot> Steps() const;
  std::vector<DonorSnapshot> Pending() const;

  // Returns and clears the steps with unusable donations that were not reported yet, of one device or of all.
  std::vector<StepSnapshot> TakeNotices(const std::optional<lazy::BackendDevice>& device);

  struct Counts {
    std::size_t pending, consumed, spared, steps, outcomes;
  };
  Counts Size() const;

 private:
  static constexpr std::size_t kKeptTexts = 64;

  DonationRegistry();
  struct Consumed {
    DonorPtr donor;
    StepPtr step;
  };
  using Buffer = const lazy::BackendData*;

  static void BeforeFork();
  static void AfterForkInParent();
  static void AfterForkInChild();

  // Updates the watch word and the atomics after a change.
  void Refresh() noexcept REQUIRES(registry_mutex);
  void AddStep(const StepPtr& step) noexcept REQUIRES(registry_mutex);
  void AddNotice(const StepPtr& step, const std::vector<DonorPtr>& donors) REQUIRES(registry_mutex);
  void Refuse(std::vector<Refusal>& refused) noexcept REQUIRES(registry_mutex);
  void AddUnread(const StepPtr& step, std::vector<Refusal> unread) REQUIRES(registry_mutex);
  // A call of a compiled function on this thread.
  struct OpenCall {
    std::weak_ptr<const CallSite> site;
    StepPtr step;                // the last that its runs have claimed
    bool has_plain_run = false;  // one that has claimed no step
  };
  static std::vector<OpenCall>& OpenCalls();  // of this thread, the innermost last
  static OpenCall* FindOpen(const CallSite* site);
  void CloseCall(OpenCall* call) noexcept REQUIRES(registry_mutex);
  void Finish(const StepPtr& step, std::shared_ptr<const GraphOutcome> outcome, const Reason& failure) noexcept
      REQUIRES(registry_mutex);
  std::shared_ptr<GraphOutcome> DescribeOutcome(const Step& step) const EXCLUDES(registry_mutex);
  static void AddTensorsOf(const Donor& donor, std::vector<std::shared_ptr<abi::TensorData>>& tensors)
      REQUIRES(registry_mutex);
  Claimed ClaimLocked(const std::vector<Offer>& offers, std::vector<Refusal> refused, bool after_backward_thread)
      REQUIRES(registry_mutex);
  static void AddMark(Donor& donor, Mark mark) REQUIRES(registry_mutex);
  static bool IsMarkedOnlyBy(const Donor& donor, const CallSite* site) REQUIRES(registry_mutex);
  void RemoveCall(const CallSite* site) noexcept REQUIRES(registry_mutex);
  bool IsResharded(const Donor& donor) const REQUIRES(registry_mutex);
  void CancelLocked(Buffer buffer) noexcept REQUIRES(registry_mutex);
  bool IsConsumedLocked(Buffer buffer) const REQUIRES(registry_mutex);
  StepSnapshot Snapshot(const Step& step) const REQUIRES(registry_mutex);
  void CountRun(bool is_step);
  void CountRunLocked(bool is_step) REQUIRES(registry_mutex);
  void AddCompilations(std::uint64_t& counter) REQUIRES(registry_mutex);
  void ForgetConsumed() noexcept REQUIRES(registry_mutex);  // removes the entries of freed buffers
  const Consumed* Lookup(Buffer buffer) const REQUIRES(registry_mutex);

  std::condition_variable settled_;
  std::atomic<bool> has_notices_{false};
  std::atomic<bool> has_steps_{false};
  std::atomic<std::int64_t> warn_min_bytes_{0};
  std::uint64_t next_step_ GUARDED_BY(registry_mutex) = 1;
  std::size_t running_ GUARDED_BY(registry_mutex) = 0;
  ska::flat_hash_map<Buffer, DonorPtr> pending_ GUARDED_BY(registry_mutex);
  ska::flat_hash_map<Buffer, Consumed> consumed_ GUARDED_BY(registry_mutex);
  std::size_t remembered_ GUARDED_BY(registry_mutex) = 0;  // the size of consumed_ after the last ForgetConsumed()
  ska::flat_hash_map<Buffer, std::pair<DonorPtr, std::uint64_t>> undonated_ GUARDED_BY(registry_mutex);
  std::size_t kept_steps_ GUARDED_BY(registry_mutex) = 8;
  std::deque<StepPtr> steps_ GUARDED_BY(registry_mutex);
  StepPtr last_claimed_ GUARDED_BY(registry_mutex);
  std::uint64_t compilations_ GUARDED_BY(registry_mutex);                       // graphs that the steps until now count
  std::vector<std::shared_ptr<StepTally>> tallies_ GUARDED_BY(registry_mutex);  // the open ones
  std::deque<StepPtr> notices_ GUARDED_BY(registry_mutex);
  std::unordered_map<std::string, std::shared_ptr<const GraphOutcome>> outcomes_ GUARDED_BY(registry_mutex);
  std::deque<std::string> outcome_order_ GUARDED_BY(registry_mutex);
  // At most kKeptTexts each; the rest is counted without its text.
  std::map<Reason, std::uint64_t> auto_refusals_ GUARDED_BY(registry_mutex);
  std::map<std::string, std::uint64_t> errors_ GUARDED_BY(registry_mutex);
  std::uint64_t other_errors_ GUARDED_BY(registry_mutex) = 0;
};

}  // namespace torch_xla_donate
