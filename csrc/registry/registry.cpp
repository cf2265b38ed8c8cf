// The marks and their states, under one mutex.
#include "registry/registry.h"

#include <pthread.h>

#include <algorithm>

#include "host/array_text.h"
#include "step/watch.h"

namespace torch_xla_donate {

std::string Donor::Shape() const {
  std::string text = ElementName(dtype);
  text += '[';
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(sizes[i]);
  }
  return text + ']';
}

bool Donor::HeldBy(const abi::TensorData* tensor) const {
  return std::any_of(holders.begin(), holders.end(),
                     [tensor](const Holder& holder) { return holder.tensor.lock().get() == tensor; });
}

std::shared_ptr<abi::TensorData> Donor::Target() const {
  for (const Holder& holder : holders) {
    if (std::shared_ptr<abi::TensorData> target = holder.target.lock()) {
      return target;
    }
  }
  return nullptr;
}

bool Donor::IsForCompiledRun() const {
  return std::all_of(holders.begin(), holders.end(), [](const Holder& holder) { return holder.site->for_compiled_run; });
}

bool Donor::Strict() const {
  return std::any_of(holders.begin(), holders.end(), [](const Holder& holder) { return holder.site->strict; });
}

DonationRegistry& DonationRegistry::Get() {
  static DonationRegistry* registry = new DonationRegistry();
  return *registry;
}

DonationRegistry::DonationRegistry() {
  // A fork while another thread holds the mutex would leave it locked for ever in the child.
  pthread_atfork([] { Get().mutex_.lock(); }, [] { Get().mutex_.unlock(); },
                 [] {
                   // Steps run on threads that the child does not have: nobody may wait for them there.
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
      const Holder fresh{leaf.tensor, site, leaf.index, leaf.target, abi::ShardingOf(*leaf.tensor)};
      const auto own = std::find_if(donor->holders.begin(), donor->holders.end(),
                                    [&leaf](const Holder& holder) { return holder.tensor.lock() == leaf.tensor; });
      // A held mark is found by its call, so it stands beside an earlier one.
      if (own == donor->holders.end() || own->site == site || site->for_compiled_run) {
        donor->holders.push_back(fresh);
      } else if (site->strict || leaf.target != nullptr) {
        *own = fresh;
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

// The donors of which the call has been the only holder; the others lose the call's marks. Needs the lock.
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
    long known = 1;  // `buffer`
    bool ours = false, read = false;
    for (std::size_t i = 0; i < entry.second->holders.size(); ++i) {
      const Holder& holder = entry.second->holders[i];
      ours = ours || holder.site.get() == site;
      const std::shared_ptr<abi::TensorData> tensor = holder.tensor.lock();
      const bool counted = std::any_of(entry.second->holders.begin(), entry.second->holders.begin() + i,
                                       [&](const Holder& before) { return before.tensor.lock() == tensor; });
      if (tensor == nullptr || counted) {
        continue;
      }
      known += tensor->handle == buffer ? 1 : 0;
      if (tensor->ir_value) {
        // The node of this buffer: kept by the tensor, and by each pending computation that reads it.
        known += 1;
        read = read || tensor->ir_value.node.use_count() > 1;
      }
    }
    if (ours && (read || buffer.use_count() > known)) {
      leaves.push_back(entry.second->holders.front().leaf);
    }
  }
  return leaves;
}

void DonationRegistry::WaitForHandOver(const CallSite* site) const {
  std::optional<lazy::BackendDevice> device;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : pending_) {
      if (entry.second->holders.front().site.get() == site) {
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
    for (const Holder& holder : found->second->holders) {
      if (holder.site.get() == site) {
        return holder.leaf;
      }
    }
  }
  return std::nullopt;
}

bool DonationRegistry::IsPending(const lazy::BackendData* buffer) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = pending_.find(buffer);
  return found != pending_.end() && !found->second->buffer.expired();
}

const DonationRegistry::Consumed* DonationRegistry::Lookup(const lazy::BackendData* buffer) const {
  auto found = consumed_.find(buffer);
  // An expired entry belonged to an earlier object at the same address.
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
  // A copy: the caller reads it without the lock.
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
    // xs.mark_sharding gives a tensor without a sharding one, with the buffer. A tensor that is overwritten has one
    // after it if it had one before. One that has been marked again is a donor.
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
    return call == nullptr ? !donor.IsForCompiledRun()
                           : std::any_of(donor.holders.begin(), donor.holders.end(),
                                         [call](const Holder& holder) { return holder.site.get() == call; });
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto found = pending_.find(parameters[i].get());
    if (found != pending_.end() && !found->second->buffer.expired() && is_meant(*found->second)) {
      result.emplace_back(i, found->second);
    }
  }
  return result;
}

StepPtr DonationRegistry::Claim(std::vector<DonorPtr> asked, std::vector<Refusal> refused, bool after_backward_thread) {
  std::lock_guard<std::mutex> lock(mutex_);
  return ClaimLocked(std::move(asked), std::move(refused), after_backward_thread);
}

StepPtr DonationRegistry::ClaimLocked(std::vector<DonorPtr> asked, std::vector<Refusal> refused,
                                      bool after_backward_thread) {
  // Runs of compiled graphs sweep nothing, and every look-up would pass what they leave behind.
  if (consumed_.size() > remembered_ + asked.size()) {
    ForgetConsumed();
  }
  auto step = std::make_shared<Step>();
  step->number = next_step_++;
  step->plain_before = PlainSteps();
  step->after_backward_thread = after_backward_thread;
  for (const DonorPtr& donor : asked) {
    donor->state = DonorState::kClaimed;
    if (donor->automatic) {
      continue;  // nothing holds it any more, so nobody will ask
    }
    const lazy::BackendData* buffer = donor->buffer.lock().get();
    pending_.erase(buffer);
    consumed_[buffer] = {donor, step};
  }
  for (auto& [donor, reason, notify] : refused) {
    donor->state = DonorState::kUnusable;
    donor->reason = std::move(reason);
    donor->reported = !notify;
    pending_.erase(donor->buffer.lock().get());
    step->refused.push_back(std::move(donor));
  }
  step->donors = std::move(asked);
  if (step->donors.empty()) {
    step->status = Step::Status::kDone;
    AddStep(step);
  }
  Refresh();
  return step;
}

void DonationRegistry::AddStep(const StepPtr& step) {
  steps_.push_back(step);
  if (steps_.size() > kKeptSteps) {
    steps_.pop_front();
  }
  const auto to_report = [](const DonorPtr& donor) { return donor->state == DonorState::kUnusable && !donor->reported; };
  if (std::any_of(step->donors.begin(), step->donors.end(), to_report) ||
      std::any_of(step->refused.begin(), step->refused.end(), to_report)) {
    notices_.push_back(step);
  }
}

void DonationRegistry::Commit(const StepPtr& step, std::string graph_hash,
                              const std::vector<lazy::BackendDataPtr>& outputs) {
  std::lock_guard<std::mutex> lock(mutex_);
  step->graph_hash = std::move(graph_hash);
  step->status = Step::Status::kRunning;
  ++running_;
  auto known = outcomes_.find(step->graph_hash);
  if (known != outcomes_.end() && known->second->used.size() == step->donors.size()) {
    step->outcome = known->second;
  } else {
    step->outputs.assign(outputs.begin(), outputs.end());
  }
}

void DonationRegistry::NoteExecutable(const StepPtr& step,
                                      const std::shared_ptr<const abi::HostCachedComputation>& executable) {
  std::lock_guard<std::mutex> lock(mutex_);
  step->executable = executable;
}

std::optional<std::string> DonationRegistry::GraphText(const std::string& graph_hash) const {
  std::shared_ptr<const abi::HostCachedComputation> executable;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = outcomes_.find(graph_hash);
    executable = found == outcomes_.end() ? nullptr : found->second->executable.lock();
  }
  return executable == nullptr ? std::nullopt : std::optional(abi::DescribeGraph(*executable).text);
}

void DonationRegistry::Settle(const StepPtr& step, const Reason& failure) {
  // Asked before the lock is taken: this calls into the host.
  std::vector<lazy::BackendDataPtr> buffers;
  std::vector<bool> used;
  buffers.reserve(step->donors.size());
  used.reserve(step->donors.size());
  for (const DonorPtr& donor : step->donors) {
    buffers.push_back(donor->buffer.lock());
    // The running step holds its parameters, so the buffer is there; one that were not could not be touched again.
    used.push_back(buffers.back() == nullptr || !buffers.back()->HasValue());
  }
  const bool all_used = std::all_of(used.begin(), used.end(), [](bool value) { return value; });
  std::shared_ptr<GraphOutcome> outcome;
  if (failure.empty() && (step->outcome == nullptr || step->outcome->used != used)) {
    outcome = std::make_shared<GraphOutcome>();
    outcome->used = used;
    outcome->executable = step->executable;
    const auto describe = [](const lazy::BackendDataPtr& buffer) {
      try {
        return buffer != nullptr ? abi::DescribeBuffer(*buffer) : std::string();
      } catch (const std::exception&) {
        return std::string();  // a reason may lack a size; the step must be settled
      }
    };
    for (const lazy::BackendDataPtr& buffer : buffers) {
      const std::string array = describe(buffer);
      outcome->donors.push_back(IsSharded(array) ? array : std::string());
    }
    if (!all_used) {
      for (const auto& weak : step->outputs) {
        outcome->outputs.push_back(describe(weak.lock()));
      }
    }
  }

  Finish(step, buffers, used, std::move(outcome), failure);
}

void DonationRegistry::Abandon(const StepPtr& step, const Reason& failure) {
  std::vector<lazy::BackendDataPtr> buffers;
  for (const DonorPtr& donor : step->donors) {
    buffers.push_back(donor->buffer.lock());
  }
  Finish(step, buffers, std::vector<bool>(buffers.size(), false), nullptr, failure);
}

void DonationRegistry::Finish(const StepPtr& step, const std::vector<lazy::BackendDataPtr>& buffers,
                              const std::vector<bool>& used, std::shared_ptr<const GraphOutcome> outcome,
                              const Reason& failure) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool was_running = step->status == Step::Status::kRunning;
  for (std::size_t i = 0; i < step->donors.size(); ++i) {
    Donor& donor = *step->donors[i];
    donor.state = used[i] ? DonorState::kDonated : DonorState::kUnusable;
    if (used[i]) {
      continue;
    }
    consumed_.erase(buffers[i].get());
    if (!failure.empty()) {
      donor.reason = failure;
      donor.reported = true;  // the failure itself is raised by torch_xla
    }
  }
  step->status = failure.empty() ? Step::Status::kDone : Step::Status::kFailed;
  if (outcome != nullptr) {
    step->outcome = outcome;
    if (outcomes_.insert_or_assign(step->graph_hash, outcome).second) {
      outcome_order_.push_back(step->graph_hash);
      if (outcome_order_.size() > kKeptOutcomes) {
        outcomes_.erase(outcome_order_.front());
        outcome_order_.pop_front();
      }
    }
  }
  step->outputs.clear();
  AddStep(step);
  if (was_running) {
    --running_;
  }
  Refresh();
  settled_.notify_all();
}

void DonationRegistry::NoteAutoRefusal(const Reason& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++auto_refusals_[reason];
}

std::map<Reason, std::uint64_t> DonationRegistry::AutoRefusals() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return auto_refusals_;
}

void DonationRegistry::NoteError(const char* error) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++errors_[error];
}

std::map<std::string, std::uint64_t> DonationRegistry::Errors() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return errors_;
}

void DonationRegistry::WaitForSteps() {
  std::unique_lock<std::mutex> lock(mutex_);
  settled_.wait(lock, [this] { return running_ == 0; });
}

StepSnapshot DonationRegistry::Snapshot(const Step& step) const {
  static const char* const names[] = {"claimed", "running", "done", "failed"};
  StepSnapshot snapshot;
  snapshot.number = step.number;
  snapshot.graph_hash = step.graph_hash;
  snapshot.status = names[static_cast<int>(step.status)];
  snapshot.plain_before = step.plain_before;
  snapshot.after_backward_thread = step.after_backward_thread;
  snapshot.donors.reserve(step.donors.size() + step.refused.size());
  for (const DonorPtr& donor : step.donors) {
    snapshot.donors.push_back(*donor);
  }
  for (const DonorPtr& donor : step.refused) {
    snapshot.donors.push_back(*donor);
  }
  if (step.outcome != nullptr) {
    snapshot.outputs = step.outcome->outputs;
    for (std::size_t i = 0; i < step.donors.size(); ++i) {
      snapshot.donors[i].array = step.outcome->donors[i];
    }
  }
  return snapshot;
}

std::vector<StepSnapshot> DonationRegistry::Steps() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepSnapshot> result;
  for (const StepPtr& step : steps_) {
    result.push_back(Snapshot(*step));
  }
  return result;
}

std::vector<Donor> DonationRegistry::Pending() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Donor> result;
  for (const auto& entry : pending_) {
    if (!entry.second->buffer.expired()) {
      result.push_back(*entry.second);
    }
  }
  return result;
}

std::vector<StepSnapshot> DonationRegistry::TakeNotices(const std::optional<lazy::BackendDevice>& device) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StepSnapshot> result;
  std::deque<StepPtr> others;
  for (const StepPtr& step : notices_) {
    const auto& donors = step->donors.empty() ? step->refused : step->donors;
    if (device.has_value() && !(donors.front()->device == *device)) {
      others.push_back(step);
      continue;
    }
    result.push_back(Snapshot(*step));
    for (const auto* donors : {&step->donors, &step->refused}) {
      for (const DonorPtr& donor : *donors) {
        donor->reported = true;
      }
    }
  }
  notices_ = std::move(others);
  Refresh();
  return result;
}

DonationRegistry::Counts DonationRegistry::Size() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {pending_.size(), consumed_.size(), spared_.size(), steps_.size(), outcomes_.size()};
}

}  // namespace torch_xla_donate
