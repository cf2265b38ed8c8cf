// Marks, and the buffers that steps have consumed. steps.cpp has the steps.
#include "registry/registry.h"

#include <pthread.h>

#include <algorithm>

#include "host/graphs.h"
#include "host/tensors.h"
#include "step/watch.h"

namespace torch_xla_donate {

DonationRegistry& DonationRegistry::Get() {
  static DonationRegistry* registry = new DonationRegistry();
  return *registry;
}

DonationRegistry::DonationRegistry() : compilations_(abi::Compilations()) {
  // Without these handlers, a fork while another thread holds the mutex would leave it locked in the child.
  pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); },
                 [] {
                   // The child does not have the threads that run steps, so waiting for them would never end.
                   Get().running_ = 0;
                   for (auto& entry : Get().consumed_) {
                     entry.second.step->status = Step::Status::kDone;
                   }
                   Get().mutex_.unlock();
                 });
}

void DonationRegistry::Refresh() {
  const auto bit = [](const auto& table, Watch watch) { return table.empty() ? Watch{} : watch; };
  SetWatch(kRegistry, bit(pending_, kMarks) | bit(consumed_, kConsumed) | bit(spared_, kSpared));
  has_notices_.store(!notices_.empty(), std::memory_order_relaxed);
}

std::size_t DonationRegistry::FirstTracked(const std::vector<Leaf>& leaves) const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (consumed_.empty()) {
    return leaves.size();
  }
  const auto tracked = [this](const Leaf& leaf) { return Lookup(leaf.buffer.get()) != nullptr; };
  return static_cast<std::size_t>(std::find_if(leaves.begin(), leaves.end(), tracked) - leaves.begin());
}

void DonationRegistry::Mark(const std::vector<Leaf>& leaves, const std::shared_ptr<const CallSite>& site) {
  std::lock_guard<std::mutex> lock(mutex_);
  pending_.reserve(pending_.size() + leaves.size());
  for (const Leaf& leaf : leaves) {
    if (!spared_.empty()) {
      spared_.erase(leaf.buffer.get());
    }
    DonorPtr& donor = pending_[leaf.buffer.get()];
    if (donor != nullptr && !donor->buffer.expired()) {
      // A compiled run finds its mark by the call.
      const auto suffices = [&](const Holder& holder) {
        return holder.tensor.lock() == leaf.tensor && holder.site != site && holder.site->strict >= site->strict &&
               holder.site->min_bytes <= site->min_bytes;
      };
      if (leaf.target != nullptr || site->for_compiled_run ||
          std::none_of(donor->holders.begin(), donor->holders.end(), suffices)) {
        donor->holders.push_back({leaf.tensor, site, leaf.index, leaf.target, abi::ShardingOf(*leaf.tensor)});
      }
      continue;
    }
    donor = std::make_shared<Donor>(leaf.buffer->device());
    donor->buffer = leaf.buffer;
    donor->holders.push_back({leaf.tensor, site, leaf.index, leaf.target, abi::ShardingOf(*leaf.tensor)});
    donor->sizes.assign(leaf.sizes.begin(), leaf.sizes.end());
    donor->dtype = leaf.dtype;
    donor->bytes = static_cast<std::int64_t>(c10::elementSize(leaf.dtype));
    for (std::int64_t size : leaf.sizes) {
      donor->bytes *= size;
    }
  }
  Refresh();
}

std::size_t DonationRegistry::Cancel(const std::vector<lazy::BackendDataPtr>& buffers) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::size_t cancelled = 0;
  for (const lazy::BackendDataPtr& buffer : buffers) {
    auto found = pending_.find(buffer.get());
    if (found != pending_.end() && !found->second->buffer.expired()) {
      found->second->state = DonorState::kCancelled;
      pending_.erase(found);
      ++cancelled;
    }
  }
  Refresh();
  return cancelled;
}

// Removes the call's marks and returns the donors that no other call holds. Needs the lock.
std::vector<DonorPtr> DonationRegistry::TakeCall(const CallSite* site) {
  std::vector<DonorPtr> taken;
  for (auto it = pending_.begin(); it != pending_.end();) {
    auto& holders = it->second->holders;
    const auto is_other = [site](const Holder& holder) { return holder.site.get() != site; };
    if (std::none_of(holders.begin(), holders.end(), is_other)) {
      taken.push_back(it->second);
      it = pending_.erase(it);
      continue;
    }
    holders.erase(std::stable_partition(holders.begin(), holders.end(), is_other), holders.end());
    ++it;
  }
  return taken;
}

void DonationRegistry::CancelCall(const CallSite* site) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const DonorPtr& donor : TakeCall(site)) {
    donor->state = DonorState::kCancelled;
  }
  Refresh();
}

void DonationRegistry::EndCall(const CallSite* site, const std::unordered_map<std::uint32_t, Reason>& reasons,
                               const Reason& reason, bool notify) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (pending_.empty()) {
    return;
  }
  std::vector<DonorPtr> taken = TakeCall(site);
  const auto leaf = [](const DonorPtr& donor) { return donor->holders.front().leaf; };
  std::sort(taken.begin(), taken.end(), [&](const auto& left, const auto& right) { return leaf(left) < leaf(right); });
  std::vector<Refusal> refused;
  for (DonorPtr& donor : taken) {
    const auto own = reasons.find(leaf(donor));
    refused.push_back({std::move(donor), own == reasons.end() ? reason : own->second, notify});
  }
  if (refused.empty()) {
    Refresh();
  } else {
    ClaimLocked({}, std::move(refused));
  }
}

std::vector<std::uint32_t> DonationRegistry::PerhapsShared(const CallSite* site) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::uint32_t> leaves;
  for (const auto& entry : pending_) {
    const lazy::BackendDataPtr buffer = entry.second->buffer.lock();
    if (buffer == nullptr) {
      continue;
    }
    const Holder* const ours = entry.second->HolderOf(site);
    if (ours == nullptr) {
      continue;
    }
    long known = 1;  // `buffer`
    bool read = false;
    for (std::size_t i = 0; i < entry.second->holders.size(); ++i) {
      const Holder& holder = entry.second->holders[i];
      const std::shared_ptr<abi::TensorData> tensor = holder.tensor.lock();
      const bool counted = std::any_of(entry.second->holders.begin(), entry.second->holders.begin() + i,
                                       [&](const Holder& before) { return before.tensor.lock() == tensor; });
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
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : pending_) {
      if (entry.second->HolderOf(site) != nullptr) {
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
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::uint32_t> leaves;
  for (std::size_t i = 0; i < live.size(); ++i) {
    const auto found = buffers[i] == nullptr ? pending_.end() : pending_.find(buffers[i].get());
    if (found == pending_.end() || found->second->HeldBy(live[i].get())) {
      continue;
    }
    for (const Holder& holder : found->second->holders) {
      if (holder.site.get() == site) {
        leaves.push_back(holder.leaf);
      }
    }
  }
  return leaves;
}

std::optional<std::uint32_t> DonationRegistry::LeafOf(const lazy::BackendData* buffer, const CallSite* site) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pending_.find(buffer);
  if (found != pending_.end() && !found->second->buffer.expired()) {
    if (const Holder* holder = found->second->HolderOf(site)) {
      return holder->leaf;
    }
  }
  return std::nullopt;
}

bool DonationRegistry::IsPending(const lazy::BackendData* buffer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = pending_.find(buffer);
  return found != pending_.end() && !found->second->buffer.expired();
}

bool DonationRegistry::HasPending(const lazy::BackendDevice* device) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(pending_.begin(), pending_.end(), [device](const auto& entry) {
    return !entry.second->buffer.expired() && (device == nullptr || entry.second->device == *device);
  });
}

const DonationRegistry::Consumed* DonationRegistry::Lookup(const lazy::BackendData* buffer) const {
  auto found = consumed_.find(buffer);
  // An expired entry belongs to an earlier object at the same address.
  return found == consumed_.end() || found->second.donor->buffer.expired() ? nullptr : &found->second;
}

bool DonationRegistry::IsTracked(const lazy::BackendData* buffer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return Lookup(buffer) != nullptr;
}

bool DonationRegistry::IsConsumed(const lazy::BackendData* buffer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const Consumed* consumed = Lookup(buffer);
  if (consumed == nullptr) {
    return false;
  }
  const Step& step = *consumed->step;
  if (step.outcome == nullptr) {
    return true;
  }
  const auto position = std::find(step.donors.begin(), step.donors.end(), consumed->donor) - step.donors.begin();
  return step.outcome->used[static_cast<std::size_t>(position)];
}

std::pair<DonorPtr, std::uint64_t> DonationRegistry::FindConsumed(const lazy::BackendData* buffer) {
  std::unique_lock<std::mutex> lock(mutex_);
  const Consumed* consumed = Lookup(buffer);
  if (consumed == nullptr) {
    return {nullptr, 0};
  }
  const StepPtr step = consumed->step;
  settled_.wait(lock, [&step] { return step->status != Step::Status::kRunning; });
  consumed = Lookup(buffer);
  return consumed == nullptr ? std::pair<DonorPtr, std::uint64_t>{nullptr, 0}
                             : std::pair<DonorPtr, std::uint64_t>{consumed->donor, step->number};
}

void DonationRegistry::RememberWouldBeConsumed(const std::vector<DonorPtr>& donors, std::uint64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const DonorPtr& donor : donors) {
    const lazy::BackendDataPtr buffer = donor->buffer.lock();
    if (buffer != nullptr) {
      spared_[buffer.get()] = {donor, step};
    }
  }
  Refresh();
}

std::pair<DonorPtr, std::uint64_t> DonationRegistry::FindWouldBeConsumed(const lazy::BackendData* buffer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = spared_.find(buffer);
  // Returns a copy, because the caller reads it without the lock.
  return found == spared_.end() || found->second.first->buffer.expired()
             ? std::pair<DonorPtr, std::uint64_t>{nullptr, 0}
             : std::pair<DonorPtr, std::uint64_t>{std::make_shared<Donor>(*found->second.first), found->second.second};
}

void DonationRegistry::ForgetWouldBeConsumed(std::uint64_t step) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = spared_.begin(); it != spared_.end();) {
    it = it->second.second == step ? spared_.erase(it) : std::next(it);
  }
  Refresh();
}

void DonationRegistry::ForgetConsumed() {
  for (auto it = spared_.begin(); it != spared_.end();) {
    it = it->second.first->buffer.expired() ? spared_.erase(it) : std::next(it);
  }
  for (auto it = consumed_.begin(); it != consumed_.end();) {
    it = it->second.donor->buffer.expired() ? consumed_.erase(it) : std::next(it);
  }
  remembered_ = consumed_.size();
}

void DonationRegistry::Sweep() {
  std::lock_guard<std::mutex> lock(mutex_);
  ForgetConsumed();
  std::vector<Refusal> lost;
  for (auto it = pending_.begin(); it != pending_.end();) {
    Donor& donor = *it->second;
    if (!donor.buffer.expired()) {
      ++it;
      continue;
    }
    // xs.mark_sharding replaces the buffer of an unsharded tensor and adds a sharding. An overwritten tensor is sharded
    // afterwards only if it was before. A tensor that was marked again is a donor.
    const auto is_resharded = [this](const Holder& holder) {
      const std::shared_ptr<abi::TensorData> tensor = holder.tensor.lock();
      const std::weak_ptr<void> none;
      const bool was_sharded = none.owner_before(holder.sharding) || holder.sharding.owner_before(none);
      return tensor != nullptr && tensor->handle != nullptr && pending_.count(tensor->handle.get()) == 0 &&
             !was_sharded && abi::ShardingOf(*tensor) != nullptr;
    };
    if (abi::IsSpmd(donor.device) && !donor.IsForCompiledRun() &&
        std::any_of(donor.holders.begin(), donor.holders.end(), is_resharded)) {
      lost.push_back({it->second, ReasonCode::kAnotherBuffer, /*notify=*/true});
    } else {
      donor.state = DonorState::kCancelled;
    }
    it = pending_.erase(it);
  }
  if (!lost.empty()) {
    ClaimLocked({}, std::move(lost));
  }
  Refresh();
}

std::vector<std::pair<std::size_t, DonorPtr>> DonationRegistry::PendingAmong(
    const std::vector<lazy::BackendDataPtr>& parameters, const CallSite* call) const {
  std::vector<std::pair<std::size_t, DonorPtr>> result;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto is_meant = [call](const Donor& donor) {
    return call == nullptr ? !donor.IsForCompiledRun() : donor.HolderOf(call) != nullptr;
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto found = pending_.find(parameters[i].get());
    if (found != pending_.end() && !found->second->buffer.expired() && is_meant(*found->second)) {
      result.emplace_back(i, found->second);
    }
  }
  return result;
}

}  // namespace torch_xla_donate
