// Keeps the pending marks by their buffers.
#include "registry/marks.h"

#include <algorithm>
#include <utility>

#include "host/graphs.h"
#include "host/tensors.h"
#include "registry/watch.h"
#include "registry/weak_keys.h"

namespace torch_xla_donate {

namespace {

// By their control blocks: a locked pointer might become the last one, and its release may need the GIL.
bool IsOneTensor(const Mark& one, const Mark& other) {
  return !one.tensor.owner_before(other.tensor) && !other.tensor.owner_before(one.tensor);
}

}  // namespace

void Marks::Refresh() noexcept { SetWatch(kMarks, pending_.empty() ? Watch{} : kMarks); }

const DonorPtr* Marks::Find(Buffer buffer) const {
  const auto found = pending_.find(buffer);
  return found == pending_.end() || found->second->buffer.expired() ? nullptr : &found->second;
}

void Marks::Add(const std::shared_ptr<CallDonors>& donors, const std::shared_ptr<const CallSite>& site) {
  MutexLock lock(registry_mutex);
  site->donors = donors;
  try {
    pending_.reserve(pending_.size() + donors->made_);
    for (std::size_t i = 0; i < donors->made_; ++i) {
      Donor& made = (*donors)[i];
      const auto [entry, is_new] = pending_.emplace(made.array.key, donors->At(i));
      if (is_new) {
        continue;
      }
      if (entry->second->buffer.expired()) {
        entry->second->status.state = DonorState::kCancelled;
        entry->second = donors->At(i);
        continue;
      }
      const DonorPtr donor = entry->second;
      if (donor->status.MarkOf(site.get()) == nullptr) {
        donors->others_.push_back(donor);
      }
      made.status.state = DonorState::kCancelled;
      AddTo(*donor, std::move(made.status.marks.front()));
    }
  } catch (...) {
    RemoveCall(site.get());
    throw;
  }
  for (const DonorPtr& donor : donors->others_) {
    DropReplaced(*donor, site.get());
  }
  Refresh();
}

void Marks::AddTo(Donor& donor, Mark mark) {
  // A compiled run finds its mark by the call.
  const bool is_known = mark.preferred_output.expired() && !mark.site->for_compiled_run &&
                        std::any_of(donor.status.marks.begin(), donor.status.marks.end(), [&mark](const Mark& before) {
                          return !before.site->for_compiled_run && before.site != mark.site &&
                                 before.site->strict >= mark.site->strict && IsOneTensor(before, mark);
                        });
  if (!is_known) {
    donor.status.marks.push_back(std::move(mark));
  }
}

// A loop may request an output for the same tensor again and again. The last one counts.
void Marks::DropReplaced(Donor& donor, const CallSite* site) noexcept {
  auto& marks = donor.status.marks;
  for (std::size_t i = site->for_compiled_run ? 0 : marks.size(); i-- > 0;) {
    const Mark& before = marks[i];
    if (before.site.get() != site && !before.site->for_compiled_run && before.site->strict <= site->strict &&
        std::any_of(marks.begin(), marks.end(), [&before, site](const Mark& mark) {
          return mark.site.get() == site && !mark.preferred_output.expired() && IsOneTensor(before, mark);
        })) {
      marks.erase(marks.begin() + i);
    }
  }
}

void Marks::Cancel(const std::vector<lazy::BackendDataPtr>& buffers) {
  MutexLock lock(registry_mutex);
  CancelLocked(buffers);
}

void Marks::Cancel(const CallDonors& donors) {
  MutexLock lock(registry_mutex);
  for (std::size_t i = 0; i < donors.Size(); ++i) {
    CancelLocked(donors[i].buffer.lock().get());
  }
  Refresh();
}

void Marks::CancelLocked(const std::vector<lazy::BackendDataPtr>& buffers) noexcept {
  for (const lazy::BackendDataPtr& buffer : buffers) {
    CancelLocked(buffer.get());
  }
  Refresh();
}

void Marks::CancelLocked(Buffer buffer) noexcept {
  const DonorPtr* donor = Find(buffer);
  if (donor != nullptr && !(*donor)->status.armed) {
    (*donor)->status.state = DonorState::kCancelled;
    pending_.erase(buffer);
  }
}

bool Marks::IsPending(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  return Find(buffer) != nullptr;
}

bool Marks::HasPending(const lazy::BackendDevice* device) const {
  MutexLock lock(registry_mutex);
  for (const auto& [buffer, donor] : pending_) {
    if (!donor->buffer.expired() && (device == nullptr || donor->array.device == *device)) {
      return true;
    }
  }
  return false;
}

std::optional<std::uint32_t> Marks::LeafOf(const lazy::BackendData* buffer, const CallSite* site) const {
  MutexLock lock(registry_mutex);
  const DonorPtr* donor = Find(buffer);
  const Mark* mark = donor == nullptr ? nullptr : (*donor)->status.MarkOf(site);
  return mark == nullptr ? std::nullopt : std::optional(mark->leaf);
}

std::vector<DonorSnapshot> Marks::Pending() const {
  MutexLock lock(registry_mutex);
  std::vector<DonorSnapshot> result;
  for (const auto& [buffer, donor] : pending_) {
    if (!donor->buffer.expired()) {
      result.emplace_back(*donor);
    }
  }
  return result;
}

std::vector<Marks::PendingMark> Marks::Among(const std::vector<lazy::BackendDataPtr>& parameters) const {
  std::vector<PendingMark> result;
  MutexLock lock(registry_mutex);
  result.reserve(std::min(parameters.size(), pending_.size()));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const DonorPtr* donor = Find(parameters[i].get());
    if (donor == nullptr || (*donor)->status.armed || (*donor)->status.IsForCompiledRun()) {
      continue;
    }
    PendingMark& found = result.emplace_back(PendingMark{i, *donor, {}, (*donor)->status.PreferredOutput()});
    for (const Mark& mark : (*donor)->status.marks) {
      if (std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock()) {
        found.tensors.push_back(std::move(tensor));
      }
    }
  }
  return result;
}

template <typename Function>
void Marks::ForPending(const CallSite* site, const Function& function) {
  const std::shared_ptr<CallDonors> donors = site->donors.lock();
  for (std::size_t i = 0; donors != nullptr && i < donors->Size(); ++i) {
    const DonorStatus& status = (*donors)[i].status;
    const Mark* mark = status.state == DonorState::kPending ? status.MarkOf(site) : nullptr;
    if (mark != nullptr && !function(*mark, *donors, i)) {
      return;
    }
  }
}

std::vector<std::uint32_t> Marks::PerhapsShared(const CallSite* site, std::size_t most) const {
  std::vector<std::shared_ptr<abi::TensorData>> tensors;  // released after the lock
  MutexLock lock(registry_mutex);
  std::vector<std::uint32_t> leaves;
  const auto add = [&leaves, &tensors, most](const Mark& ours, const CallDonors& donors,
                                             std::size_t number) REQUIRES(registry_mutex) {
    const Donor& donor = donors[number];
    const lazy::BackendDataPtr buffer = donor.buffer.lock();
    if (buffer == nullptr) {
      return true;
    }
    const auto& marks = donor.status.marks;
    long known = 1;  // `buffer`
    bool read = false;
    for (std::size_t i = 0; i < marks.size(); ++i) {
      const Mark& mark = marks[i];
      const bool counted = std::any_of(marks.begin(), marks.begin() + i,
                                       [&mark](const Mark& before) { return IsOneTensor(before, mark); });
      std::shared_ptr<abi::TensorData> locked = counted ? nullptr : mark.tensor.lock();
      if (locked == nullptr) {
        continue;
      }
      const auto& tensor = tensors.emplace_back(std::move(locked));
      known += tensor->handle == buffer ? 1 : 0;
      if (tensor->ir_value) {
        // The tensor and each pending computation that reads the buffer hold this node.
        known += 1;
        read = read || tensor->ir_value.node.use_count() > 1;
      }
    }
    if (read || buffer.use_count() > known) {
      leaves.push_back(ours.leaf);
    }
    return leaves.size() < most;
  };
  ForPending(site, add);
  return leaves;
}

std::vector<DonorPtr> Marks::Arm(const std::vector<const lazy::BackendData*>& buffers, const CallSite* call) {
  std::vector<DonorPtr> donors;
  donors.reserve(buffers.size());
  MutexLock lock(registry_mutex);
  for (const lazy::BackendData* buffer : buffers) {
    const DonorPtr* donor = Find(buffer);
    if (donor == nullptr || (*donor)->status.armed || (*donor)->status.MarkOf(call) == nullptr) {
      return {};
    }
    donors.push_back(*donor);
  }
  for (const DonorPtr& donor : donors) {
    donor->status.armed = true;
  }
  return donors;
}

void Marks::Disarm(Donor& donor) noexcept {
  MutexLock lock(registry_mutex);
  donor.status.armed = false;
}

std::size_t Marks::Size() const {
  MutexLock lock(registry_mutex);
  return pending_.size();
}

// ---- For the steps ----

void Marks::Remove(const Donor& donor) noexcept {
  if (const auto found = pending_.find(donor.array.key); found != pending_.end() && found->second.get() == &donor) {
    pending_.erase(found);
  }
}

void Marks::RemoveCall(const CallSite* site) noexcept {
  const std::shared_ptr<CallDonors> donors = site->donors.lock();
  const auto is_of_call = [site](const Mark& mark) { return mark.site.get() == site; };
  for (std::size_t i = 0; donors != nullptr && i < donors->Size(); ++i) {
    Donor& donor = (*donors)[i];
    if (donor.status.state != DonorState::kPending) {
      continue;
    }
    auto& marks = donor.status.marks;
    if (std::all_of(marks.begin(), marks.end(), is_of_call)) {
      donor.status.state = DonorState::kCancelled;
      Remove(donor);
    } else {
      marks.erase(std::remove_if(marks.begin(), marks.end(), is_of_call), marks.end());
    }
  }
  Refresh();
}

void Marks::RemoveFreed() noexcept {
  ForgetGone(pending_, [](const DonorPtr& donor) REQUIRES(registry_mutex) {
    const bool is_gone = donor->buffer.expired();
    if (is_gone && donor->status.state == DonorState::kPending) {
      donor->status.state = DonorState::kCancelled;
    }
    return is_gone;
  });
  Refresh();
}

std::vector<std::pair<std::uint32_t, DonorPtr>> Marks::OnlyOfCall(const CallSite* site) {
  std::vector<std::pair<std::uint32_t, DonorPtr>> found;
  const auto add = [&found, site](const Mark& mark, const CallDonors& donors,
                                  std::size_t number) REQUIRES(registry_mutex) {
    const auto& marks = donors[number].status.marks;
    if (std::all_of(marks.begin(), marks.end(), [site](const Mark& other) { return other.site.get() == site; })) {
      found.emplace_back(mark.leaf, donors.At(number));
    }
    return true;
  };
  ForPending(site, add);
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<DonorPtr> Marks::Resharded(std::vector<std::shared_ptr<abi::TensorData>>& tensors) const {
  std::vector<DonorPtr> found;
  for (const auto& [buffer, donor] : pending_) {
    if (donor->buffer.expired() && abi::IsSpmd(donor->array.device) && !donor->status.IsForCompiledRun() &&
        IsResharded(*donor, tensors)) {
      found.push_back(donor);
    }
  }
  return found;
}

// xs.mark_sharding replaces the buffer of an unsharded tensor and adds a sharding. An overwritten tensor is sharded
// afterwards only if it was before. A tensor that was marked again is a donor.
bool Marks::IsResharded(const Donor& donor, std::vector<std::shared_ptr<abi::TensorData>>& tensors) const {
  const std::weak_ptr<void> none;
  for (const Mark& mark : donor.status.marks) {
    const auto& tensor = tensors.emplace_back(mark.tensor.lock());
    const bool was_sharded = none.owner_before(mark.sharding) || mark.sharding.owner_before(none);
    if (tensor != nullptr && tensor->handle != nullptr && pending_.count(tensor->handle.get()) == 0 && !was_sharded &&
        abi::ShardingOf(*tensor) != nullptr) {
      return true;
    }
  }
  return false;
}

bool Marks::IsArmed(const lazy::BackendData* buffer) const {
  const auto found = pending_.find(buffer);
  return found != pending_.end() && found->second->status.armed;
}

}  // namespace torch_xla_donate
