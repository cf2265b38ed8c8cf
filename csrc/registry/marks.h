// The pending marks: buffers that the program has given to the next step that reads them.
//
// A Donor is one marked buffer. It is pending until a step claims it (steps.h), or until its mark is cancelled. Only
// this folder knows the marks: device data carries no flag of ours.
//
// Ownership: marks and steps share the donors, which hold buffers and tensors weakly, so a mark never keeps memory
//   alive.
// Threads: any thread may call any member. registry_mutex guards everything. No member holds it while it waits for a
//   step, takes the GIL or runs a graph. A forked child can use it.
// Errors: only std::bad_alloc. A member that throws it has changed nothing.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "host/never_destroyed.h"
#include "registry/donor.h"

namespace torch_xla_donate {

class Marks {
 public:
  static Marks& Get() { return NeverDestroyed<Marks>(); }

  // Marks all donors of a call. A buffer that is marked already gains a mark if the tensor is new, or if the call
  // requests more for it: an output, or to be stricter.
  void Add(const std::shared_ptr<CallDonors>& donors, const std::shared_ptr<const CallSite>& site);

  // Cancels the marks of these buffers that are pending and not armed.
  void Cancel(const std::vector<lazy::BackendDataPtr>& buffers);
  // The same for the buffers that a call was given, even if another call has marked them.
  void Cancel(const CallDonors& donors);

  bool IsPending(const lazy::BackendData* buffer) const;
  // Whether a mark is pending on the device; null for any.
  bool HasPending(const lazy::BackendDevice* device) const;
  // The leaf of this call that marked the buffer, if the mark is still pending.
  std::optional<std::uint32_t> LeafOf(const lazy::BackendData* buffer, const CallSite* site) const;
  std::vector<DonorSnapshot> Pending() const;

  // A pending mark, and the tensors that its donor's marks name.
  struct PendingMark {
    std::size_t position;  // of the parameter
    DonorPtr donor;
    c10::SmallVector<std::shared_ptr<abi::TensorData>, 1> tensors;
    std::shared_ptr<abi::TensorData> preferred_output;  // that should take the buffer, or null
  };
  // The pending marks among a graph's parameters that are meant for steps.
  std::vector<PendingMark> Among(const std::vector<lazy::BackendDataPtr>& parameters) const;
  // The leaves of a call's pending marks whose buffers may have another holder, judged by reference counts. The result
  // may have too many leaves, never too few; it ends with the `most`-th.
  std::vector<std::uint32_t> PerhapsShared(const CallSite* site, std::size_t most) const;

  // Keeps the call's marks of these buffers from being cancelled until Disarm(). Returns their donors; if not all are
  // pending, it keeps none and returns none.
  std::vector<DonorPtr> Arm(const std::vector<const lazy::BackendData*>& buffers, const CallSite* call);
  static void Disarm(Donor& donor) noexcept;

  std::size_t Size() const;

  // ---- For the steps ----

  void CancelLocked(const std::vector<lazy::BackendDataPtr>& buffers) noexcept REQUIRES(registry_mutex);
  // A step has claimed the donor, or refuses it. Another donor may have its buffer's address by now. Needs a Refresh().
  void Remove(const Donor& donor) noexcept REQUIRES(registry_mutex);
  // Updates the watch word after a change.
  void Refresh() noexcept REQUIRES(registry_mutex);
  // Cancels the marks of a call. A buffer that another call has also marked stays marked.
  void RemoveCall(const CallSite* site) noexcept REQUIRES(registry_mutex);
  void RemoveFreed() noexcept REQUIRES(registry_mutex);
  // The donors that only this call has marked, with their leaves, by leaf.
  static std::vector<std::pair<std::uint32_t, DonorPtr>> OnlyOfCall(const CallSite* site) REQUIRES(registry_mutex);
  // Those whose tensors now hold other buffers because they were sharded.
  // The caller releases the tensors after the lock, because the last reference to one may need the GIL.
  std::vector<DonorPtr> Resharded(std::vector<std::shared_ptr<abi::TensorData>>& tensors) const
      REQUIRES(registry_mutex);
  bool IsArmed(const lazy::BackendData* buffer) const REQUIRES(registry_mutex);

 private:
  using Buffer = const lazy::BackendData*;

  static void AddTo(Donor& donor, Mark mark) REQUIRES(registry_mutex);
  // Drops the marks of earlier calls that this call's replace. After all have been added, so that nothing can fail.
  static void DropReplaced(Donor& donor, const CallSite* site) noexcept REQUIRES(registry_mutex);
  void CancelLocked(Buffer buffer) noexcept REQUIRES(registry_mutex);
  // The call's marks of donors that are pending, in the order of its leaves, until the function returns false.
  template <typename Function>
  static void ForPending(const CallSite* site, const Function& function) REQUIRES(registry_mutex);
  // Null if no mark of the buffer is pending. An entry of a freed buffer belongs to an earlier object.
  const DonorPtr* Find(Buffer buffer) const REQUIRES(registry_mutex);
  bool IsResharded(const Donor& donor, std::vector<std::shared_ptr<abi::TensorData>>& tensors) const
      REQUIRES(registry_mutex);

  ska::flat_hash_map<Buffer, DonorPtr> pending_ GUARDED_BY(registry_mutex);
};

}  // namespace torch_xla_donate
