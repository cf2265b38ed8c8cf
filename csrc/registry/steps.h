// Steps with donors, their outcomes, and the buffers that they have consumed.
//
// A step claims the pending marks (marks.h) that it reads. After it, each donor is donated or unusable. Reports can
// read the last 8 steps.
//
// Ownership: steps share their donors with marks.h. They hold buffers and executables weakly, but for consumed buffers.
// Threads: any thread may call any member. registry_mutex guards everything. No member holds it while it waits for a
//   step, takes the GIL or runs a graph. A forked child can use it.
// Errors: only std::bad_alloc. A member that throws it has changed nothing. The end of a step throws nothing, as
//   threads wait for it: without memory, the report misses the step, and says so.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "host/graphs.h"
#include "host/never_destroyed.h"
#include "registry/donor.h"
#include "registry/marks.h"
#include "registry/tallies.h"

namespace torch_xla_donate {

// The use that a compiled graph's last run made of its donors. The next run does the same, unless a buffer is exported
// (dlpack) in only one of them.
struct GraphOutcome {
  std::vector<std::string> outputs;  // shapes as XLA writes them, if a reason needs them
  std::vector<bool> used;            // for each donor, in the order of the step
  std::vector<std::string> donors;   // the same; sharded ones as XLA writes them, else empty
  std::weak_ptr<const abi::HostCachedComputation> executable;
};

// A step that had donors, marked or automatic.
struct Step {
  enum class Status { kClaimed, kRunning, kDone };

  Step(std::uint64_t count, std::vector<DonorPtr> offered, std::vector<DonorPtr> not_offered)
      : number(count), donors(std::move(offered)), refused(std::move(not_offered)), used(donors.size()) {}

  const std::uint64_t number;
  const std::vector<DonorPtr> donors;   // offered to XLA, in parameter order
  const std::vector<DonorPtr> refused;  // read by the step but not offered; each has its reason

  // The arguments of a compiled function's call that none of its runs has read. Known and reported at the call's end.
  std::vector<DonorPtr> unread GUARDED_BY(registry_mutex);
  Status status GUARDED_BY(registry_mutex) = Status::kClaimed;
  std::string graph_hash GUARDED_BY(registry_mutex);
  // Of the graph's last run, if it has run before; then of this run.
  std::shared_ptr<const GraphOutcome> outcome GUARDED_BY(registry_mutex);
  // Kept until the outcome is known.
  std::vector<std::weak_ptr<lazy::BackendData>> outputs GUARDED_BY(registry_mutex);
  std::weak_ptr<const abi::HostCachedComputation> executable GUARDED_BY(registry_mutex);
  std::uint64_t compilations GUARDED_BY(registry_mutex) = 0;  // graphs that torch_xla compiled for it, see NoteRun()
  // The same for each step without donors until the next step with donors; as many as steps are kept.
  std::deque<std::uint64_t> plain_steps GUARDED_BY(registry_mutex);
  std::vector<std::weak_ptr<StepTally>> tallies GUARDED_BY(registry_mutex);  // that count it
  // Memory for the end of the step, so that the end cannot fail. Only Commit() and the thread that ends the step use
  // it.
  std::vector<bool> used;
  std::vector<lazy::BackendDataPtr> consumed;
};
using StepPtr = std::shared_ptr<Step>;

// A copy that readers use without the lock.
struct StepSnapshot {
  std::uint64_t number = 0;
  std::string graph_hash;
  std::vector<DonorSnapshot> donors;
  std::vector<std::string> outputs;
  std::uint64_t compilations = 0;
  std::deque<std::uint64_t> plain_steps;
};

// A donor, and the number of the step that has consumed it.
struct ConsumedDonor {
  DonorSnapshot donor;
  std::uint64_t step;
};

class Steps {
 public:
  static constexpr std::size_t kKeptOutcomes = 1024;

  static Steps& Get() { return NeverDestroyed<Steps>(); }

  // ---- Buffers that steps have consumed ----

  // Whether a step has claimed the buffer and is not known to have left it unused. Does not wait.
  bool IsTracked(const lazy::BackendData* buffer) const;
  // Returns the index of the first donor whose buffer IsTracked(), or the number of donors.
  std::size_t FirstTracked(const CallDonors& donors) const;
  // As IsTracked(), but false during the step if the graph did not use the buffer in its last run. Does not wait.
  bool IsConsumed(const lazy::BackendData* buffer) const;
  // Cancels the marks of these buffers. If a step has consumed one of them, or a call is about to, cancels none and
  // returns its position.
  std::optional<std::size_t> Cancel(const std::vector<lazy::BackendDataPtr>& buffers);
  // Returns nullopt if no step has consumed the buffer. Waits for the step to end, because only then the outcome is
  // certain. The caller must not hold the GIL or a host lock.
  std::optional<ConsumedDonor> FindConsumed(const lazy::BackendData* buffer);

  // ---- Buffers that a step would have consumed if donation were enabled ----

  // From now on their uses are reported, until they are marked again or freed. Returns the tensors that hold them, by
  // their marks.
  std::vector<std::shared_ptr<abi::TensorData>> NoteUndonated(const std::vector<DonorPtr>& donors, std::uint64_t step);
  // Returns nullopt if no step would have consumed the buffer.
  std::optional<ConsumedDonor> FindUndonated(const lazy::BackendData* buffer) const;
  // The program may use the step's donors, because the step failed or will run again.
  void ForgetUndonated(std::uint64_t step);
  void ForgetUndonated(const CallDonors& marked);

  // ---- Calls of compiled functions ----

  // A compiled function has marked its arguments. Until its call ends or is cancelled, all runs of this thread are one
  // step, together with the arguments that they have not read.
  void BeginCall(const std::shared_ptr<const CallSite>& site);
  // Cancels the pending marks of one call. A buffer that another call has also marked stays marked.
  void CancelCall(const CallSite* site) noexcept;
  // Ends the pending marks of one call as unusable, for the reason of the leaf or else the general one. They join the
  // last step that the call's runs have claimed, also if it still runs.
  void EndCall(const CallSite* site, const std::unordered_map<std::uint32_t, Reason>& reasons, const Reason& reason,
               bool notify);

  // ---- The life of a step, driven by the hooks ----

  // Forgets freed buffers. A mark becomes unusable if its tensor now holds another buffer because it was sharded.
  // Called once per step; linear in the number of entries.
  void Sweep();

  // A donor that a step offers to XLA, with its places in the step's graph.
  struct Offer {
    DonorPtr donor;
    std::optional<std::size_t> parameter = std::nullopt, preferred_output = std::nullopt, requested = std::nullopt;
    bool armed = false;  // whether the run is the one that has armed the mark
  };
  // Moves donors from pending to a new step. They are offered to XLA, or refused with a reason each. Skips marks that
  // another thread has cancelled or armed meanwhile; so only the step's own list says which donors it has.
  struct Claimed {
    StepPtr step;                                           // null if no donor is left
    std::vector<std::shared_ptr<abi::TensorData>> tensors;  // that hold the donors offered, by their marks
  };
  Claimed Claim(const std::vector<Offer>& offers, std::vector<Refusal> refused);

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
  // The device has the step's run, or the step has failed for the reason given. Reads from the buffers whether XLA used
  // them. Keeps the used ones of a run that has not failed: see TakeConsumed().
  void RecordOutcome(const StepPtr& step, const Reason& failure) noexcept;
  // What the device's last run has consumed, for its next run, which destroys it when the device has that run. XLA's
  // CPU client waits for a run when a buffer that it consumes is destroyed. A program whose old tensors go at once
  // could not prepare a step while the one before it runs. The buffers have no memory of the device any more.
  std::vector<lazy::BackendDataPtr> TakeConsumed(const lazy::BackendDevice& device) noexcept;
  // The step will not run, so XLA used no donor.
  void Abandon(const StepPtr& step, const Reason& failure) noexcept;
  // Whether the donor's step has ended without using it.
  bool IsUnusable(const Donor& donor) const;

  // ---- For readers ----

  std::vector<StepPtr> Kept() const;
  std::vector<StepSnapshot> Snapshots(const std::vector<StepPtr>& steps) const;
  // The optimised HLO of a graph that has run with donors; nullopt if torch_xla has dropped its executable.
  std::optional<std::string> GraphText(const std::string& graph_hash) const;
  // Waits until the steps that run now have ended; other threads may begin more. The caller must not hold the GIL.
  void Wait();

  bool HasNotices() const noexcept { return has_notices_.load(std::memory_order_relaxed); }
  // Returns and clears the steps with unusable donations that were not reported yet, of one device or of all.
  std::vector<StepSnapshot> TakeNotices(const std::optional<lazy::BackendDevice>& device);

  struct Counts {
    std::size_t consumed, just_consumed, undonated, kept, outcomes;
  };
  Counts Size() const;

 private:
  struct Consumed {
    DonorPtr donor;
    StepPtr step;
    std::weak_ptr<lazy::BackendData> buffer;
  };
  using Buffer = const lazy::BackendData*;
  // A call of a compiled function on this thread.
  struct OpenCall {
    std::weak_ptr<const CallSite> site;
    StepPtr step;                // the last that its runs have claimed
    bool has_plain_run = false;  // one that has claimed no step
  };

  friend Steps& NeverDestroyed<Steps>();
  Steps();
  // A forked child does not have the threads that run steps, so waiting for them would never end.
  void EndAll();

  static std::vector<OpenCall>& OpenCalls();  // of this thread, the innermost last
  static OpenCall* FindOpen(const CallSite* site);
  void CloseCall(OpenCall* call) noexcept REQUIRES(registry_mutex);

  const Consumed* Lookup(Buffer buffer) const REQUIRES(registry_mutex);
  bool IsConsumedLocked(Buffer buffer) const REQUIRES(registry_mutex);
  void ForgetFreed() noexcept REQUIRES(registry_mutex);

  Claimed ClaimLocked(const std::vector<Offer>& offers, std::vector<Refusal> refused) REQUIRES(registry_mutex);
  static void Refuse(std::vector<Refusal>& refused) noexcept REQUIRES(registry_mutex);
  void AddUnread(const StepPtr& step, std::vector<Refusal> unread) REQUIRES(registry_mutex);
  std::shared_ptr<GraphOutcome> DescribeOutcome(const Step& step) const EXCLUDES(registry_mutex);
  void Finish(const StepPtr& step, std::shared_ptr<const GraphOutcome> outcome, const Reason& failure) noexcept
      REQUIRES(registry_mutex);
  // The outcomes of these donors are known. Counts them, and notes the step if they need a notice.
  void Report(const StepPtr& step, const std::vector<DonorPtr>& donors) REQUIRES(registry_mutex);
  void Keep(const StepPtr& step) noexcept REQUIRES(registry_mutex);

  void CountRun(bool is_step);
  void CountRunLocked(bool is_step) REQUIRES(registry_mutex);
  void AddCompilations(std::uint64_t& counter) REQUIRES(registry_mutex);
  StepSnapshot Snapshot(const Step& step) const REQUIRES(registry_mutex);
  // Updates the watch word and the atomics after a change.
  void Refresh() noexcept REQUIRES(registry_mutex);

  std::condition_variable ended_;
  std::atomic<bool> has_notices_{false};
  std::atomic<bool> has_steps_{false};
  std::uint64_t next_step_ GUARDED_BY(registry_mutex) = 1;
  std::set<std::uint64_t> running_ GUARDED_BY(registry_mutex);  // by number
  ska::flat_hash_map<Buffer, Consumed> consumed_ GUARDED_BY(registry_mutex);
  std::map<lazy::BackendDevice, std::vector<lazy::BackendDataPtr>> last_consumed_ GUARDED_BY(registry_mutex);
  std::size_t remembered_ GUARDED_BY(registry_mutex) = 0;  // the size of consumed_ after the last ForgetFreed()
  ska::flat_hash_map<Buffer, std::pair<DonorPtr, std::uint64_t>> undonated_ GUARDED_BY(registry_mutex);
  static constexpr std::size_t kMostKept = 8;
  std::deque<StepPtr> kept_ GUARDED_BY(registry_mutex);
  StepPtr last_claimed_ GUARDED_BY(registry_mutex);
  std::uint64_t compilations_ GUARDED_BY(registry_mutex);  // graphs that the steps until now count
  std::deque<StepPtr> notices_ GUARDED_BY(registry_mutex);
  std::unordered_map<std::string, std::shared_ptr<const GraphOutcome>> outcomes_ GUARDED_BY(registry_mutex);
  std::deque<std::string> outcome_order_ GUARDED_BY(registry_mutex);
};

}  // namespace torch_xla_donate
