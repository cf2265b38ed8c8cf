// Marks, and the buffers that steps have consumed. steps.cpp has the steps.
#include "registry/registry.h"

#include <pthread.h>

#include <algorithm>

#include "host/graphs.h"
#include "host/tensors.h"
#include "registry/watch.h"

namespace torch_xla_donate {

DonationRegistry& DonationRegistry::Get() {
  static DonationRegistry* registry = new DonationRegistry();
  return *registry;
}

DonationRegistry::DonationRegistry() : compilations_(abi::Compilations()) {
  // Without these handlers, a fork while another thread holds the mutex would leave it locked in the child.
  pthread_atfork(&BeforeFork, &AfterForkInParent, &AfterForkInChild);
}

void DonationRegistry::BeforeFork() NO_THREAD_SAFETY_ANALYSIS { registry_mutex.lock(); }

void DonationRegistry::AfterForkInParent() NO_THREAD_SAFETY_ANALYSIS { registry_mutex.unlock(); }

void DonationRegistry::AfterForkInChild() NO_THREAD_SAFETY_ANALYSIS {
  // The child does not have the threads that run steps, so waiting for them would never end.
  Get().running_ = 0;
  for (auto& entry : Get().consumed_) {
    entry.second.step->status = Step::Status::kDone;
  }
  registry_mutex.unlock();
}

void DonationRegistry::Refresh() noexcept {
  const auto bit = [](const auto& table, Watch watch) { return table.empty() ? Watch{} : watch; };
  SetWatch(kRegistry, bit(pending_, kMarks) | bit(consumed_, kConsumed) | bit(undonated_, kUndonated));
  has_notices_.store(!notices_.empty(), std::memory_order_relaxed);
}

std::size_t DonationRegistry::FirstTracked(const std::vector<Leaf>& leaves) const {
  MutexLock lock(registry_mutex);
  std::size_t i = consumed_.empty() ? leaves.size() : 0;
  while (i < leaves.size() && Lookup(leaves[i].buffer.get()) == nullptr) {
    ++i;
  }
  return i;
}

void DonationRegistry::AddMarks(const std::vector<Leaf>& leaves, const std::shared_ptr<const CallSite>& site) {
  MutexLock lock(registry_mutex);
  try {
    pending_.reserve(pending_.size() + leaves.size());
    for (const Leaf& leaf : leaves) {
      Mark mark{leaf.tensor, site, leaf.index, leaf.target, abi::ShardingOf(*leaf.tensor)};
      const auto found = pending_.find(leaf.buffer.get());
      if (found != pending_.end() && !found->second->buffer.expired()) {
        AddMark(*found->second, std::move(mark));
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
    Refresh();
    throw;
  }
  for (const Leaf& leaf : leaves) {
    undonated_.erase(leaf.buffer.get());
  }
  Refresh();
}

void DonationRegistry::AddMark(Donor& donor, Mark mark) {
  // A compiled run finds its mark by the call.
  const bool for_compiled_run = mark.site->for_compiled_run;
  const bool has_target = !mark.target.expired();
  const std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock();
  for (Mark& before : donor.status.marks) {
    if (for_compiled_run || before.site == mark.site || before.tensor.lock() != tensor) {
      continue;
    }
    if (!has_target && before.site->strict >= mark.site->strict && before.site->min_bytes <= mark.site->min_bytes) {
      return;
    }
    // A loop may request a target for the same tensor again and again. The last one counts.
    if (has_target && before.site->strict <= mark.site->strict && before.site->min_bytes >= mark.site->min_bytes) {
      before = std::move(mark);
      std::rotate(&before, &before + 1, donor.status.marks.end());
      return;
    }
  }
  donor.status.marks.push_back(std::move(mark));
}

void DonationRegistry::CancelLocked(Buffer buffer) noexcept {
  const auto found = pending_.find(buffer);
  if (found != pending_.end() && !found->second->buffer.expired() && !found->second->status.armed) {
    found->second->status.state = DonorState::kCancelled;
    pending_.erase(found);
  }
}

std::optional<std::size_t> DonationRegistry::Cancel(const std::vector<lazy::BackendDataPtr>& buffers) {
  MutexLock lock(registry_mutex);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const auto found = pending_.find(buffers[i].get());
    if (IsConsumedLocked(buffers[i].get()) || (found != pending_.end() && found->second->status.armed)) {
      return i;
    }
  }
  for (const lazy::BackendDataPtr& buffer : buffers) {
    CancelLocked(buffer.get());
  }
  Refresh();
  return std::nullopt;
}

void DonationRegistry::CancelPending(const std::vector<lazy::BackendDataPtr>& buffers) {
  MutexLock lock(registry_mutex);
  for (const lazy::BackendDataPtr& buffer : buffers) {
    CancelLocked(buffer.get());
  }
  Refresh();
}

bool DonationRegistry::IsMarkedOnlyBy(const Donor& donor, const CallSite* site) {
  const auto& marks = donor.status.marks;
  return std::all_of(marks.begin(), marks.end(), [site](const Mark& mark) { return mark.site.get() == site; });
}

void DonationRegistry::RemoveCall(const CallSite* site) noexcept {
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (IsMarkedOnlyBy(*it->second, site)) {
      it->second->status.state = DonorState::kCancelled;
      it = pending_.erase(it);
      continue;
    }
    auto& marks = it->second->status.marks;
    const auto is_of_call = [site](const Mark& mark) { return mark.site.get() == site; };
    marks.erase(std::remove_if(marks.begin(), marks.end(), is_of_call), marks.end());
    ++it;
  }
}

void DonationRegistry::CancelCall(const CallSite* site) noexcept {
  MutexLock lock(registry_mutex);
  CloseCall(FindOpen(site));
  RemoveCall(site);
  Refresh();
}

void DonationRegistry::EndCall(const CallSite* site, const std::unordered_map<std::uint32_t, Reason>& reasons,
                               const Reason& reason, bool notify) {
  MutexLock lock(registry_mutex);
  OpenCall* const call = FindOpen(site);
  if (pending_.empty()) {
    CloseCall(call);
    return;
  }
  std::map<std::uint32_t, Refusal> by_leaf;
  for (const auto& [buffer, donor] : pending_) {
    if (IsMarkedOnlyBy(*donor, site)) {
      const std::uint32_t leaf = donor->status.marks.front().leaf;
      const auto own = reasons.find(leaf);
      by_leaf.insert_or_assign(leaf, Refusal{donor, own == reasons.end() ? reason : own->second, notify});
    }
  }
  std::vector<Refusal> refused;
  for (auto& [leaf, refusal] : by_leaf) {
    refused.push_back(std::move(refusal));
  }
  if (call != nullptr && call->step != nullptr && !refused.empty()) {
    AddUnread(call->step, std::move(refused));
  } else {
    ClaimLocked({}, std::move(refused), /*after_backward_thread=*/false);
  }
  CloseCall(call);
  RemoveCall(site);
  Refresh();
}

std::vector<std::uint32_t> DonationRegistry::PerhapsShared(const CallSite* site) const {
  MutexLock lock(registry_mutex);
  std::vector<std::uint32_t> leaves;
  for (const auto& entry : pending_) {
    const lazy::BackendDataPtr buffer = entry.second->buffer.lock();
    if (buffer == nullptr) {
      continue;
    }
    const auto& marks = entry.second->status.marks;
    const Mark* const ours = entry.second->status.MarkOf(site);
    if (ours == nullptr) {
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

void DonationRegistry::WaitForHandOver(const CallSite* site) const {
  std::optional<lazy::BackendDevice> device;
  {
    MutexLock lock(registry_mutex);
    for (const auto& entry : pending_) {
      if (entry.second->status.MarkOf(site) != nullptr) {
        device = entry.second->device;
        break;
      }
    }
  }
  if (device.has_value()) {
    abi::WaitForHandOver(*device);
  }
}

std::vector<std::uint32_t> DonationRegistry::SharedWith(const std::vector<std::shared_ptr<abi::TensorData>>& live,
                                                        const CallSite* site) const {
  std::vector<lazy::BackendDataPtr> buffers;
  for (const auto& data : live) {
    buffers.push_back(data == nullptr ? nullptr : abi::BufferOf(*data));
  }
  MutexLock lock(registry_mutex);
  std::vector<std::uint32_t> leaves;
  for (std::size_t i = 0; i < live.size(); ++i) {
    const auto found = buffers[i] == nullptr ? pending_.end() : pending_.find(buffers[i].get());
    if (found == pending_.end() || found->second->status.IsMarkedBy(live[i].get())) {
      continue;
    }
    for (const Mark& mark : found->second->status.marks) {
      if (mark.site.get() == site) {
        leaves.push_back(mark.leaf);
      }
    }
  }
  return leaves;
}

std::optional<std::uint32_t> DonationRegistry::LeafOf(const lazy::BackendData* buffer, const CallSite* site) const {
  MutexLock lock(registry_mutex);
  const auto found = pending_.find(buffer);
  if (found != pending_.end() && !found->second->buffer.expired()) {
    if (const Mark* mark = found->second->status.MarkOf(site)) {
      return mark->leaf;
    }
  }
  return std::nullopt;
}

bool DonationRegistry::IsPending(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  auto found = pending_.find(buffer);
  return found != pending_.end() && !found->second->buffer.expired();
}

bool DonationRegistry::HasPending(const lazy::BackendDevice* device) const {
  MutexLock lock(registry_mutex);
  for (const auto& [buffer, donor] : pending_) {
    if (!donor->buffer.expired() && (device == nullptr || donor->device == *device)) {
      return true;
    }
  }
  return false;
}

const DonationRegistry::Consumed* DonationRegistry::Lookup(const lazy::BackendData* buffer) const {
  auto found = consumed_.find(buffer);
  // An expired entry belongs to an earlier object at the same address.
  return found == consumed_.end() || found->second.donor->buffer.expired() ? nullptr : &found->second;
}

bool DonationRegistry::IsTracked(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  return Lookup(buffer) != nullptr;
}

bool DonationRegistry::IsConsumed(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  return IsConsumedLocked(buffer);
}

bool DonationRegistry::IsConsumedLocked(Buffer buffer) const {
  const Consumed* consumed = Lookup(buffer);
  return consumed != nullptr && !consumed->donor->status.left_unused;
}

std::optional<DonationRegistry::ConsumedDonor> DonationRegistry::FindConsumed(const lazy::BackendData* buffer) {
  MutexLock lock(registry_mutex);
  const Consumed* consumed = Lookup(buffer);
  while (consumed != nullptr && consumed->step->status == Step::Status::kRunning) {
    registry_mutex.Wait(settled_);
    consumed = Lookup(buffer);
  }
  return consumed == nullptr ? std::nullopt
                             : std::optional(ConsumedDonor{DonorSnapshot(*consumed->donor), consumed->step->number});
}

void DonationRegistry::NoteUndonated(const std::vector<DonorPtr>& donors, std::uint64_t step) {
  MutexLock lock(registry_mutex);
  for (const DonorPtr& donor : donors) {
    const lazy::BackendDataPtr buffer = donor->buffer.lock();
    if (buffer != nullptr) {
      undonated_[buffer.get()] = {donor, step};
    }
  }
  Refresh();
}

std::optional<DonationRegistry::ConsumedDonor> DonationRegistry::FindUndonated(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  const auto found = undonated_.find(buffer);
  return found == undonated_.end() || found->second.first->buffer.expired()
             ? std::nullopt
             : std::optional(ConsumedDonor{DonorSnapshot(*found->second.first), found->second.second});
}

void DonationRegistry::ForgetUndonated(std::uint64_t step) {
  MutexLock lock(registry_mutex);
  for (auto it = undonated_.begin(); it != undonated_.end();) {
    it = it->second.second == step ? undonated_.erase(it) : std::next(it);
  }
  Refresh();
}

void DonationRegistry::ForgetConsumed() noexcept {
  for (auto it = undonated_.begin(); it != undonated_.end();) {
    it = it->second.first->buffer.expired() ? undonated_.erase(it) : std::next(it);
  }
  for (auto it = consumed_.begin(); it != consumed_.end();) {
    it = it->second.donor->buffer.expired() ? consumed_.erase(it) : std::next(it);
  }
  remembered_ = consumed_.size();
}

// xs.mark_sharding replaces the buffer of an unsharded tensor and adds a sharding. An overwritten tensor is sharded
// afterwards only if it was before. A tensor that was marked again is a donor.
bool DonationRegistry::IsResharded(const Donor& donor) const {
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

void DonationRegistry::Sweep() {
  MutexLock lock(registry_mutex);
  ForgetConsumed();
  std::vector<Refusal> lost;
  for (const auto& [buffer, donor] : pending_) {
    if (donor->buffer.expired() && abi::IsSpmd(donor->device) && !donor->status.IsForCompiledRun() &&
        IsResharded(*donor)) {
      lost.push_back({donor, ReasonCode::kAnotherBuffer, /*notify=*/true});
    }
  }
  ClaimLocked({}, std::move(lost), /*after_backward_thread=*/false);
  for (auto it = pending_.begin(); it != pending_.end();) {
    if (!it->second->buffer.expired()) {
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

std::vector<DonationRegistry::PendingMark> DonationRegistry::PendingAmong(
    const std::vector<lazy::BackendDataPtr>& parameters, const CallSite* call) const {
  std::vector<PendingMark> result;
  MutexLock lock(registry_mutex);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto found = pending_.find(parameters[i].get());
    if (found == pending_.end() || found->second->buffer.expired()) {
      continue;
    }
    const DonorStatus& status = found->second->status;
    if (call == nullptr ? status.armed || status.IsForCompiledRun() : status.MarkOf(call) == nullptr) {
      continue;
    }
    result.push_back({i, found->second, {}, status.Target()});
    for (const Mark& mark : status.marks) {
      if (std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock()) {
        result.back().tensors.push_back(std::move(tensor));
      }
    }
  }
  return result;
}

void DonationRegistry::AddTensorsOf(const Donor& donor, std::vector<std::shared_ptr<abi::TensorData>>& tensors) {
  const lazy::BackendDataPtr buffer = donor.buffer.lock();
  for (const Mark& mark : donor.status.marks) {
    std::shared_ptr<abi::TensorData> tensor = mark.tensor.lock();
    if (tensor != nullptr && buffer != nullptr && tensor->handle == buffer) {
      tensors.push_back(std::move(tensor));
    }
  }
}

std::vector<std::shared_ptr<abi::TensorData>> DonationRegistry::TensorsOf(const std::vector<DonorPtr>& donors) const {
  std::vector<std::shared_ptr<abi::TensorData>> tensors;
  MutexLock lock(registry_mutex);
  for (const DonorPtr& donor : donors) {
    AddTensorsOf(*donor, tensors);
  }
  return tensors;
}

bool DonationRegistry::Arm(const std::vector<lazy::BackendDataPtr>& buffers, const CallSite* call) {
  MutexLock lock(registry_mutex);
  const auto is_pending = [this, call](Buffer buffer) REQUIRES(registry_mutex) {
    const auto found = pending_.find(buffer);
    return found != pending_.end() && !found->second->status.armed && found->second->status.MarkOf(call) != nullptr;
  };
  for (const lazy::BackendDataPtr& buffer : buffers) {
    if (!is_pending(buffer.get())) {
      return false;
    }
  }
  for (const lazy::BackendDataPtr& buffer : buffers) {
    pending_.find(buffer.get())->second->status.armed = true;
  }
  return true;
}

void DonationRegistry::Disarm(const std::vector<lazy::BackendDataPtr>& buffers) noexcept {
  MutexLock lock(registry_mutex);
  for (const lazy::BackendDataPtr& buffer : buffers) {
    if (const auto found = pending_.find(buffer.get()); found != pending_.end()) {
      found->second->status.armed = false;
    }
  }
}

}  // namespace torch_xla_donate
