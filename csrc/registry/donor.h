// A mark, the call that made it, a donor, and a step with its donors. registry.h describes when they change.
//
// Ownership: donors hold buffers and tensors weakly. Threads: a member is fixed when its object is made, or the
//   registry's mutex guards it. The compiler checks the latter.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "host/graphs.h"
#include "registry/reasons.h"
#include "registry/step_tally.h"
#include "registry/thread_safety.h"

namespace torch_xla_donate {

namespace lazy = torch::lazy;

// The effect of an unusable donation, in increasing order.
enum class Strictness : std::uint8_t { kOff, kWarn, kError };

// One call of donate_buffer() or of a compiled function.
struct CallSite {
  std::string where;  // "train.py:12"
  Strictness strict = Strictness::kWarn;
  std::int64_t min_bytes = 0;     // the size from which an unusable donor matters, as it was set at the call
  bool for_compiled_run = false;  // for one run of a compiled graph: steps ignore the marks
  std::shared_ptr<void> names;    // names the leaves; a Python object, opaque here (see callbacks.h)
};

// A marked leaf: its tensor, and the call that marked it.
struct Mark {
  std::weak_ptr<abi::TensorData> tensor;
  std::shared_ptr<const CallSite> site;
  std::uint32_t leaf = 0;
  std::weak_ptr<abi::TensorData> target;  // the output that should take the buffer; empty if not requested
  std::weak_ptr<void> sharding;           // of the tensor when it was marked, under SPMD
};

enum class DonorState {
  kPending,    // marked; no step has read it
  kClaimed,    // a step that reads it is being compiled or is running
  kDonated,    // consumed: the memory belongs to an output of the step
  kUnusable,   // a step read it and XLA did not use it: still alive, mark over
  kCancelled,  // cancelled, or freed before a step read it
};

// The buffer of a donor. Never changes.
struct DonorArray {
  explicit DonorArray(lazy::BackendDevice where) : device(std::move(where)) {}

  std::weak_ptr<lazy::BackendData> buffer;
  c10::SmallVector<std::int64_t, 4> sizes;
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::int64_t bytes = 0;  // of the whole array, before any sharding
  lazy::BackendDevice device;
  bool automatic = false;  // found by liveness: has no marks

  // "f32[8,4]"
  std::string Shape() const;
};

// The marks of a donor, and its outcome.
struct DonorStatus {
  c10::SmallVector<Mark, 1> marks;  // oldest first; several for tied tensors and for several calls
  DonorState state = DonorState::kPending;
  Reason reason;  // why it is unusable, if known here; empty if XLA found no use for it
  // In the graph of the step that reads it: the number of its parameter, of the output computed from it, and of the
  // output that `into=` names.
  std::optional<std::size_t> parameter, successor, requested;
  bool reported = false;     // needs no notice: TakeNotices() has returned it, or the user has disabled donation
  bool armed = false;        // this thread's next run of a compiled graph consumes it
  bool left_unused = false;  // claimed by a graph whose last run did not use it

  bool IsMarkedBy(const abi::TensorData* tensor) const;
  // The mark that a call made; null if it made none.
  const Mark* MarkOf(const CallSite* site) const;
  // The output that should take the buffer: the last one requested that is still alive, or null.
  std::shared_ptr<abi::TensorData> Target() const;
  // The first of the strictest calls that marked it; null for an automatic donor.
  const CallSite* StrictestSite() const;
  Strictness Strict() const;
  // Whether so many bytes are too few for each call that marked it to matter if it is unusable.
  bool IsSmall(std::int64_t bytes) const;
  // Whether all its marks are for a run of a compiled graph.
  bool IsForCompiledRun() const;
};

struct Donor : DonorArray {
  explicit Donor(DonorArray array) : DonorArray(std::move(array)) {
    status.reported = automatic;  // no call has asked for it
  }

  DonorStatus status GUARDED_BY(registry_mutex);
};
using DonorPtr = std::shared_ptr<Donor>;

// A copy that readers use without the lock.
struct DonorSnapshot : DonorArray, DonorStatus {
  explicit DonorSnapshot(const Donor& donor) REQUIRES(registry_mutex) : DonorArray(donor), DonorStatus(donor.status) {}

  std::string array;  // of a sharded donor whose step has ended, as XLA writes it; else empty, and the buffer has it
};

// The use that a compiled graph's last run made of its donors. The next run does the same, unless a buffer is exported
// (dlpack) in only one of them.
struct GraphOutcome {
  std::vector<std::string> outputs;  // shapes as XLA writes them, if a reason needs them
  std::vector<bool> used;            // for each donor, in the order of the step
  std::vector<std::string> donors;   // the same; sharded ones as XLA writes them, else empty
  std::weak_ptr<const abi::HostCachedComputation> executable;
};

// A step that read marked buffers.
struct Step {
  enum class Status { kClaimed, kRunning, kDone, kFailed };

  Step(std::uint64_t count, std::vector<DonorPtr> offered, std::vector<DonorPtr> not_offered)
      : number(count), donors(std::move(offered)), refused(std::move(not_offered)) {}

  const std::uint64_t number;
  const std::vector<DonorPtr> donors;   // offered to XLA, in parameter order
  const std::vector<DonorPtr> refused;  // read by the step but not offered; each has its reason
  bool after_backward_thread = false;   // set before another thread can see the step

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
  // Memory for the end of the step, so that the end cannot fail. Only the thread that ends the step uses it.
  std::vector<bool> used;
};
using StepPtr = std::shared_ptr<Step>;

// A copy that readers use without the lock.
struct StepSnapshot {
  std::uint64_t number = 0;
  std::string graph_hash;
  std::string status;
  std::vector<DonorSnapshot> donors;
  std::vector<std::string> outputs;
  bool after_backward_thread = false;
  std::uint64_t compilations = 0;
  std::deque<std::uint64_t> plain_steps;
};

}  // namespace torch_xla_donate
