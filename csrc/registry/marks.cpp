// Keeps the pending marks by their buffers.
#include "registry/marks.h"

#include <algorithm>
#include <utility>

#include "host/graphs.h"
#include "host/tensors.h"
#include "registry/watch.h"

namespace torch_xla_donate {

Marks& Marks::Get() {
  static Marks* marks = new Marks();
  return *marks;
}

void Marks::Refresh() noexcept { SetWatch(kMarks, pending_.empty() ? Watch{} : kMarks); }

const DonorPtr* Marks::Find(Buffer buffer) const {
  const auto found = pending_.find(buffer);
  return found == pending_.end() || found->second->array.buffer.expired() ? nullptr : &found->second;
}

void Marks::Add(const std::vector<Leaf>& leaves, const std::shared_ptr<const CallSite>& site) {
  MutexLock lock(registry_mutex);
  try {
    pending_.reserve(pending_.size() + leaves.size());
    for (const Leaf& leaf : leaves) {
      Mark mark{leaf.tensor, site, leaf.index, leaf.preferred_output, abi::ShardingOf(*leaf.tensor)};
      if (const DonorPtr* donor = Find(leaf.buffer.get())) {
        AddTo(**donor, std::move(mark));
        continue;
      }
      DonorArray array(leaf.buffer->device());
      array.buffer = leaf.buffer;
      array.sizes.assign(leaf.sizes.begin(), leaf.sizes.end());
      array.dtype = leaf.dtype;
      array.bytes = static_cast<std::int64_t>(c10::elementSize(leaf.dtype));
      for (std::int64_t size : leaf.sizes) {
        array.bytes *= size;
      }
      auto donor = std::make_shared<Donor>(std::move(array));
      donor->status.marks.push_back(std::move(mark));
      pending_.insert_or_assign(leaf.buffer.get(), std::move(donor));
    }
  } catch (...) {
    RemoveCall(site.get());
    throw;
  }
  Refresh();
}

void Marks::AddTo(Donor& donor, Mark mark) {
  // A compiled run finds its mark by the call.
  const bool for_compiled_run = mark.site->for_compiled_run;
  const bool has_output = !mark.preferred_output.expired();
  const std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock();
  for (Mark& before : donor.status.marks) {
    if (for_compiled_run || before.site == mark.site || before.tensor.lock() != tensor) {
      continue;
    }
    if (!has_output && before.site->strict >= mark.site->strict && before.site->min_bytes <= mark.site->min_bytes) {
      return;
    }
    // A loop may request an output for the same tensor again and again. The last one counts.
    if (has_output && before.site->strict <= mark.site->strict && before.site->min_bytes >= mark.site->min_bytes) {
      before = std::move(mark);
      std::rotate(&before, &before + 1, donor.status.marks.end());
      return;
    }
  }
  donor.status.marks.push_back(std::move(mark));
}

void Marks::Cancel(const std::vector<lazy::BackendDataPtr>& buffers) {
  MutexLock lock(registry_mutex);
  CancelLocked(buffers);
}

void Marks::CancelLocked(const std::vector<lazy::BackendDataPtr>& buffers) noexcept {
  for (const lazy::BackendDataPtr& buffer : buffers) {
    const DonorPtr* donor = Find(buffer.get());
    if (donor != nullptr && !(*donor)->status.armed) {
      (*donor)->status.state = DonorState::kCancelled;
      pending_.erase(buffer.get());
    }
  }
  Refresh();
}

bool Marks::IsPending(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  return Find(buffer) != nullptr;
}

bool Marks::HasPending(const lazy::BackendDevice* device) const {
  MutexLock lock(registry_mutex);
  for (const auto& [buffer, donor] : pending_) {
    if (!donor->array.buffer.expired() && (device == nullptr || donor->array.device == *device)) {
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
    if (!donor->array.buffer.expired()) {
      result.emplace_back(*donor);
    }
  }
  return result;
}

Marks::PendingMark Marks::Describe(std::size_t position, const DonorPtr& donor) {
  PendingMark described{position, donor, {}, donor->status.PreferredOutput()};
  for (const Mark& mark : donor->status.marks) {
    if (std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock()) {
      described.tensors.push_back(std::move(tensor));
    }
  }
  return described;
}

std::vector<Marks::PendingMark> Marks::Among(const std::vector<lazy::BackendDataPtr>& parameters,
                                             const CallSite* call) const {
  std::vector<PendingMark> result;
  MutexLock lock(registry_mutex);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const DonorPtr* donor = Find(parameters[i].get());
    if (donor == nullptr) {
      continue;
    }
    const DonorStatus& status = (*donor)->status;
    if (call == nullptr ? !status.armed && !status.IsForCompiledRun() : status.MarkOf(call) != nullptr) {
      result.push_back(Describe(i, *donor));
    }
  }
  return result;
}

std::vector<Marks::PendingMark> Marks::OfCall(const CallSite* site) const {
  std::vector<PendingMark> result;
  MutexLock lock(registry_mutex);
  for (const auto& [buffer, donor] : pending_) {
    const Mark* mark = donor->status.MarkOf(site);
    if (mark != nullptr && !donor->array.buffer.expired()) {
      result.push_back(Describe(mark->leaf, donor));
    }
  }
  return result;
}

std::optional<lazy::BackendDevice> Marks::DeviceOf(const CallSite* site) const {
  MutexLock lock(registry_mutex);
  for (const auto& [buffer, donor] : pending_) {
    if (donor->status.MarkOf(site) != nullptr) {
      return donor->array.device;
    }
  }
  return std::nullopt;
}

std::vector<std::uint32_t> Marks::PerhapsShared(const CallSite* site) const {
  MutexLock lock(registry_mutex);
  std::vector<std::uint32_t> leaves;
  for (const auto& entry : pending_) {
    const lazy::BackendDataPtr buffer = entry.second->array.buffer.lock();
    const auto& marks = entry.second->status.marks;
    const Mark* const ours = entry.second->status.MarkOf(site);
    if (buffer == nullptr || ours == nullptr) {
      continue;
    }
    long known = 1;  // `buffer`
    bool read = false;
    for (std::size_t i = 0; i < marks.size(); ++i) {
      const std::shared_ptr<abi::TensorData> tensor = marks[i].tensor.lock();
      const bool counted = std::any_of(marks.begin(), marks.begin() + i,
                                       [&](const Mark& before) { return before.tensor.lock() == tensor; });
      if (tensor == nullptr || counted) {
        continue;
      }
      known += tensor->handle == buffer ? 1 : 0;
      if (tensor->ir_value) {
        // The tensor and each pending computation that reads the buffer hold this node.
        known += 1;
        read = read || tensor->ir_value.node.use_count() > 1;
      }
    }
    if (read || buffer.use_count() > known) {
      leaves.push_back(ours->leaf);
    }
  }
  return leaves;
}

bool Marks::Arm(const std::vector<lazy::BackendDataPtr>& buffers, const CallSite* call) {
  MutexLock lock(registry_mutex);
  for (const lazy::BackendDataPtr& buffer : buffers) {
    const DonorPtr* donor = Find(buffer.get());
    if (donor == nullptr || (*donor)->status.armed || (*donor)->status.MarkOf(call) == nullptr) {
      return false;
    }
  }
  for (const lazy::BackendDataPtr& buffer : buffers) {
    pending_.find(buffer.get())->second->status.armed = true;
  }
  return true;
}

void Marks::Disarm(const std::vector<lazy::BackendDataPtr>& buffers) noexcept {
  MutexLock lock(registry_mutex);
  for (const lazy::BackendDataPtr& buffer : buffers) {
    if (const auto found = pending_.find(buffer.get()); found != pending_.end()) {
      found->second->status.armed = false;
    }
  }
}

std::size_t Marks::Size() const {
  MutexLock lock(registry_mutex);
  return pending_.size();
}

// ---- For the steps ----

void Marks::Remove(const Donor& donor) noexcept {
  pending_.erase(donor.array.buffer.lock().get());
  Refresh();
}

void Marks::RemoveCall(const CallSite* site) noexcept {
  const auto is_of_call = [site](const Mark& mark) { return mark.site.get() == site; };
  for (auto it = pending_.begin(); it != pending_.end();) {
    auto& marks = it->second->status.marks;
    if (std::all_of(marks.begin(), marks.end(), is_of_call)) {
      it->second->status.state = DonorState::kCancelled;
      it = pending_.erase(it);
    } else {
      marks.erase(std::remove_if(marks.begin(), marks.end(), is_of_call), marks.end());
      ++it;
    }
  }
  Refresh();
}

void Marks::RemoveFreed() noexcept {
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (!it->second->array.buffer.expired()) {
      ++it;
      continue;
    }
    if (it->second->status.state == DonorState::kPending) {
      it->second->status.state = DonorState::kCancelled;
    }
    it = pending_.erase(it);
  }
  Refresh();
}

std::map<std::uint32_t, DonorPtr> Marks::OnlyOfCall(const CallSite* site) const {
  std::map<std::uint32_t, DonorPtr> found;
  for (const auto& [buffer, donor] : pending_) {
    const auto& marks = donor->status.marks;
    if (std::all_of(marks.begin(), marks.end(), [site](const Mark& mark) { return mark.site.get() == site; })) {
      found.insert_or_assign(marks.front().leaf, donor);
    }
  }
  return found;
}

std::vector<DonorPtr> Marks::Resharded() const {
  std::vector<DonorPtr> found;
  for (const auto& [buffer, donor] : pending_) {
    if (donor->array.buffer.expired() && abi::IsSpmd(donor->array.device) && !donor->status.IsForCompiledRun() &&
        IsResharded(*donor)) {
      found.push_back(donor);
    }
  }
  return found;
}

// xs.mark_sharding replaces the buffer of an unsharded tensor and adds a sharding. An overwritten tensor is sharded
// afterwards only if it was before. A tensor that was marked again is a donor.
bool Marks::IsResharded(const Donor& donor) const {
  const std::weak_ptr<void> none;
  for (const Mark& mark : donor.status.marks) {
    const std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock();
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
