// A mark, the call that made it, and a donor. marks.h and steps.h describe when they change.
//
// Ownership: donors hold buffers and tensors weakly. Threads: a member of a donor is const, or the registry's mutex
//   guards it. The compiler checks both, but for `buffer`.
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/graphs.h"
#include "host/tensors.h"
#include "registry/reasons.h"
#include "registry/thread_safety.h"

namespace torch_xla_donate {

// The effect of an unusable donation, in increasing order.
enum class Strictness : std::uint8_t { kOff, kWarn, kError };

class CallDonors;

// One call of donate_buffer() or of a compiled function.
struct CallSite {
  std::string where;  // "train.py:12"
  Strictness strict = Strictness::kWarn;
  bool for_compiled_run = false;  // for one run of a compiled graph: steps ignore the marks
  std::shared_ptr<void> names;    // names the leaves; a Python object, opaque here (see callbacks.h)
  // What it was given; the owner is the object that Python holds. Set when the call marks its leaves.
  mutable std::weak_ptr<CallDonors> donors GUARDED_BY(registry_mutex);
};

// A marked leaf: its tensor, and the call that marked it.
struct Mark {
  std::weak_ptr<abi::TensorData> tensor;
  std::shared_ptr<const CallSite> site;
  std::uint32_t leaf = 0;
  std::weak_ptr<abi::TensorData> preferred_output;  // that should take the buffer; empty if not requested
  std::weak_ptr<void> sharding;                     // of the tensor when it was marked, under SPMD
};

enum class DonorState {
  kPending,    // marked; no step has read it
  kClaimed,    // a step that reads it is being compiled or is running
  kDonated,    // consumed: the memory belongs to an output of the step
  kUnusable,   // a step read it and XLA did not use it: still alive, mark over
  kCancelled,  // cancelled, or freed before a step read it
};

// The buffer of a donor.
struct DonorArray {
  DonorArray(const lazy::BackendDataPtr& of, at::IntArrayRef of_sizes)
      : key(of.get()), sizes(of_sizes.begin(), of_sizes.end()), dtype(DtypeOf(*of)), device(of->device()) {
    bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
    for (const std::int64_t size : of_sizes) {
      bytes *= size;
    }
  }

  const lazy::BackendData* key;  // the address of the buffer; compared only
  c10::SmallVector<std::int64_t, 4> sizes;
  at::ScalarType dtype;  // of the buffer, not of the tensor
  std::int64_t bytes;    // of the whole array, before any sharding
  lazy::BackendDevice device;
  bool automatic = false;  // found by liveness: has no marks

  // "f32[8,4]"
  std::string Shape() const;

 private:
  static at::ScalarType DtypeOf(const lazy::BackendData& buffer);
};

// The marks of a donor, and its outcome.
struct DonorStatus {
  c10::SmallVector<Mark, 1> marks;  // oldest first; several for tied tensors and for several calls
  DonorState state = DonorState::kPending;
  Reason reason;  // why it is unusable, if known here; empty if XLA found no use for it
  // In the graph of the step that reads it: the number of its parameter, of the output that the planner gives it to,
  // and of the output that `into=` names.
  std::optional<std::size_t> parameter, preferred_output, requested;
  bool reported = false;     // needs no notice: TakeNotices() has returned it, or the user has disabled donation
  bool armed = false;        // this thread's next run of a compiled graph consumes it
  bool left_unused = false;  // claimed by a graph whose last run did not use it

  // The mark that a call made; null if it made none.
  const Mark* MarkOf(const CallSite* site) const;
  // The output that should take the buffer: the last one requested that is still alive, or null.
  std::shared_ptr<abi::TensorData> PreferredOutput() const;
  // The first of the strictest calls that marked it; null for an automatic donor.
  const CallSite* StrictestSite() const;
  Strictness Strict() const;
  // Whether a call marked it for a run of a compiled graph. Steps ignore it until that call ends.
  bool IsForCompiledRun() const;
};

struct Donor {
  // An automatic donor.
  Donor(const lazy::BackendDataPtr& of, DonorArray&& of_array) : buffer(of), array(std::move(of_array)) {
    status.reported = array.automatic;  // no call has asked for it
  }
  Donor(const lazy::BackendDataPtr& of, at::IntArrayRef sizes, Mark mark) : buffer(of), array(of, sizes) {
    status.marks.push_back(std::move(mark));
  }

  // Appends the tensors that hold the buffer, by its marks.
  void AddTensors(std::vector<std::shared_ptr<abi::TensorData>>& tensors) const REQUIRES(registry_mutex);
  // The step has consumed the buffer. Reports keep the donor, which would keep the memory of the objects that it names:
  // an object and its counters are one allocation.
  void ForgetObjects() noexcept REQUIRES(registry_mutex);

  // Empty once a step has consumed it. That step's end clears it, so the step itself may read it without the lock.
  std::weak_ptr<lazy::BackendData> buffer;
  const DonorArray array;
  DonorStatus status GUARDED_BY(registry_mutex);
};
using DonorPtr = std::shared_ptr<Donor>;

// The donors of one call, by their order among its leaves. They are allocated in blocks, because an allocation for each
// takes longer than the mark. A block stays as long as one of its donors is used, so blocks are small.
//
// The call of donate_buffer() or of a compiled function owns it, and fills it before it marks.
class CallDonors {
 public:
  explicit CallDonors(std::size_t leaves) : leaves_(leaves) {}

  void Add(const lazy::BackendDataPtr& buffer, at::IntArrayRef sizes, Mark mark) {
    if (blocks_.empty() || blocks_.back()->size() == kBlock) {
      blocks_.push_back(std::make_shared<std::vector<Donor>>());
      blocks_.back()->reserve(std::min(kBlock, leaves_ - made_));
    }
    blocks_.back()->emplace_back(buffer, sizes, std::move(mark));
    ++made_;
  }

  std::size_t Size() const { return made_ + others_.size(); }
  Donor& operator[](std::size_t i) const {
    return i < made_ ? (*blocks_[i / kBlock])[i % kBlock] : *others_[i - made_];
  }
  DonorPtr At(std::size_t i) const {
    return i < made_ ? DonorPtr(blocks_[i / kBlock], &(*this)[i]) : others_[i - made_];
  }

 private:
  friend class Marks;
  static constexpr std::size_t kBlock = 64;

  std::size_t leaves_, made_ = 0;
  std::vector<std::shared_ptr<std::vector<Donor>>> blocks_;
  std::vector<DonorPtr> others_;  // of buffers that an earlier call has marked; the donors made for them are not used
};

// A marked buffer that a step does not donate.
struct Refusal {
  DonorPtr donor;
  Reason reason;
  bool notify;  // false if the user has disabled donation
};

// A copy that readers use without the lock.
struct DonorSnapshot : DonorArray, DonorStatus {
  explicit DonorSnapshot(const Donor& donor) REQUIRES(registry_mutex)
      : DonorArray(donor.array), DonorStatus(donor.status), buffer(donor.buffer) {}

  std::weak_ptr<lazy::BackendData> buffer;
  std::string array;  // of a sharded donor whose step has ended, as XLA writes it; else empty, and the buffer has it
};

}  // namespace torch_xla_donate
