// The life of a step, from its claim to its outcome, and the snapshots for readers.
#include "registry/steps.h"

#include <pthread.h>

#include <algorithm>

#include "host/array_text.h"
#include "registry/watch.h"
#include "registry/weak_keys.h"

namespace torch_xla_donate {

namespace {

bool IsToReport(const std::vector<DonorPtr>& donors) REQUIRES(registry_mutex) {
  for (const DonorPtr& donor : donors) {
    const DonorStatus& status = donor->status;
    if (status.state == DonorState::kUnusable && !status.reported && status.Strict() > Strictness::kOff) {
      return true;
    }
  }
  return false;
}

// A copy whose code stays if there is no memory for its details.
void Set(Reason& reason, const Reason& value) noexcept {
  reason.code = value.code;
  try {
    reason.details = value.details;
  } catch (const std::bad_alloc&) {
    reason.details.clear();
  }
}

}  // namespace

Steps::Steps() : compilations_(abi::Compilations()) {
  pthread_atfork(nullptr, nullptr, [] { Get().EndAll(); });
}

void Steps::EndAll() {
  MutexLock lock(registry_mutex);
  running_.clear();
  for (auto& [buffer, consumed] : consumed_) {
    consumed.step->status = Step::Status::kDone;
  }
}

void Steps::Refresh() noexcept {
  Marks::Get().Refresh();
  SetWatch(kConsumed | kUndonated,
           (consumed_.empty() ? kNothing : kConsumed) | (undonated_.empty() ? kNothing : kUndonated));
  has_notices_.store(!notices_.empty(), std::memory_order_relaxed);
}

// ---- Buffers that steps have consumed ----

const Steps::Consumed* Steps::Lookup(Buffer buffer) const {
  auto found = consumed_.find(buffer);
  // An expired entry belongs to an earlier object at the same address.
  return found == consumed_.end() || found->second.buffer.expired() ? nullptr : &found->second;
}

bool Steps::IsTracked(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  return Lookup(buffer) != nullptr;
}

std::size_t Steps::FirstTracked(const CallDonors& donors) const {
  MutexLock lock(registry_mutex);
  std::size_t i = consumed_.empty() ? donors.Size() : 0;
  while (i < donors.Size() && Lookup(donors[i].array.key) == nullptr) {
    ++i;
  }
  return i;
}

bool Steps::IsConsumed(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  return IsConsumedLocked(buffer);
}

bool Steps::IsConsumedLocked(Buffer buffer) const {
  const Consumed* consumed = Lookup(buffer);
  return consumed != nullptr && !consumed->donor->status.left_unused;
}

std::optional<std::size_t> Steps::Cancel(const std::vector<lazy::BackendDataPtr>& buffers) {
  MutexLock lock(registry_mutex);
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (IsConsumedLocked(buffers[i].get()) || Marks::Get().IsArmed(buffers[i].get())) {
      return i;
    }
  }
  Marks::Get().CancelLocked(buffers);
  return std::nullopt;
}

std::optional<ConsumedDonor> Steps::FindConsumed(const lazy::BackendData* buffer) {
  MutexLock lock(registry_mutex);
  const Consumed* consumed = Lookup(buffer);
  while (consumed != nullptr && consumed->step->status == Step::Status::kRunning) {
    registry_mutex.Wait(ended_);
    consumed = Lookup(buffer);
  }
  return consumed == nullptr ? std::nullopt
                             : std::optional(ConsumedDonor{DonorSnapshot(*consumed->donor), consumed->step->number});
}

std::vector<std::shared_ptr<abi::TensorData>> Steps::NoteUndonated(const std::vector<DonorPtr>& donors,
                                                                   std::uint64_t step) {
  std::vector<std::shared_ptr<abi::TensorData>> tensors;
  MutexLock lock(registry_mutex);
  for (const DonorPtr& donor : donors) {
    donor->AddTensors(tensors);
  }
  undonated_.reserve(undonated_.size() + donors.size());
  for (const DonorPtr& donor : donors) {
    const lazy::BackendDataPtr buffer = donor->buffer.lock();
    if (buffer != nullptr) {
      undonated_[buffer.get()] = {donor, step};
    }
  }
  Refresh();
  return tensors;
}

std::optional<ConsumedDonor> Steps::FindUndonated(const lazy::BackendData* buffer) const {
  MutexLock lock(registry_mutex);
  const auto found = undonated_.find(buffer);
  return found == undonated_.end() || found->second.first->buffer.expired()
             ? std::nullopt
             : std::optional(ConsumedDonor{DonorSnapshot(*found->second.first), found->second.second});
}

void Steps::ForgetUndonated(std::uint64_t step) {
  MutexLock lock(registry_mutex);
  for (auto it = undonated_.begin(); it != undonated_.end();) {
    it = it->second.second == step ? undonated_.erase(it) : std::next(it);
  }
  Refresh();
}

void Steps::ForgetUndonated(const CallDonors& marked) {
  MutexLock lock(registry_mutex);
  for (std::size_t i = 0; i < marked.Size(); ++i) {
    undonated_.erase(marked[i].array.key);
  }
  Refresh();
}

void Steps::ForgetFreed() noexcept {
  ForgetGone(undonated_, [](const auto& entry) { return entry.first->buffer.expired(); });
  ForgetGone(consumed_, [](const Consumed& entry) { return entry.buffer.expired(); });
  remembered_ = consumed_.size();
}

void Steps::Sweep() {
  std::vector<std::shared_ptr<abi::TensorData>> tensors;  // released after the lock
  MutexLock lock(registry_mutex);
  ForgetFreed();
  std::vector<Refusal> lost;
  for (DonorPtr& donor : Marks::Get().Resharded(tensors)) {
    lost.push_back({std::move(donor), ReasonCode::kAnotherBuffer, /*notify=*/true});
  }
  ClaimLocked({}, std::move(lost));
  Marks::Get().RemoveFreed();
  Refresh();
}

// ---- Calls of compiled functions ----

std::vector<Steps::OpenCall>& Steps::OpenCalls() {
  thread_local std::vector<OpenCall> calls;
  while (!calls.empty() && calls.back().site.expired()) {  // an interrupt has ended it
    calls.pop_back();
  }
  return calls;
}

void Steps::BeginCall(const std::shared_ptr<const CallSite>& site) { OpenCalls().push_back({site, {}}); }

Steps::OpenCall* Steps::FindOpen(const CallSite* site) {
  for (OpenCall& call : OpenCalls()) {
    if (call.site.lock().get() == site) {
      return &call;
    }
  }
  return nullptr;
}

void Steps::CloseCall(OpenCall* call) noexcept {
  if (call == nullptr) {
    return;
  }
  try {
    if (call->has_plain_run && call->step == nullptr) {
      CountRunLocked(/*is_step=*/true);
    } else if (call->has_plain_run) {
      AddCompilations(call->step->compilations);
    }
  } catch (const std::bad_alloc&) {
    Tallies::Get().NoteLoss();  // the report misses a step without donors
  }
  // With those that an interrupt has left open inside it.
  OpenCalls().erase(OpenCalls().begin() + (call - OpenCalls().data()), OpenCalls().end());
}

void Steps::CancelCall(const CallSite* site) noexcept {
  MutexLock lock(registry_mutex);
  CloseCall(FindOpen(site));
  Marks::Get().RemoveCall(site);
}

void Steps::EndCall(const CallSite* site, const std::unordered_map<std::uint32_t, Reason>& reasons,
                    const Reason& reason, bool notify) {
  MutexLock lock(registry_mutex);
  OpenCall* const call = FindOpen(site);
  std::vector<Refusal> refused;
  for (const auto& [leaf, donor] : Marks::OnlyOfCall(site)) {
    const auto own = reasons.find(leaf);
    refused.push_back({donor, own == reasons.end() ? reason : own->second, notify});
  }
  if (call != nullptr && call->step != nullptr && !refused.empty()) {
    AddUnread(call->step, std::move(refused));
  } else if (!refused.empty()) {
    ClaimLocked({}, std::move(refused));
  }
  CloseCall(call);
  Marks::Get().RemoveCall(site);
  Refresh();
}

// ---- The life of a step ----

Steps::Claimed Steps::Claim(const std::vector<Offer>& offers, std::vector<Refusal> refused) {
  MutexLock lock(registry_mutex);
  return ClaimLocked(offers, std::move(refused));
}

Steps::Claimed Steps::ClaimLocked(const std::vector<Offer>& offers, std::vector<Refusal> refused) {
  // Runs of compiled graphs do not call Sweep(), so freed buffers would slow down every look-up.
  if (consumed_.size() > remembered_ + offers.size()) {
    ForgetFreed();
  }
  // Another thread may have cancelled or armed marks since the caller found them.
  std::vector<const Offer*> left;
  std::vector<DonorPtr> donors, not_offered;
  left.reserve(offers.size());
  donors.reserve(offers.size());
  for (const Offer& offer : offers) {
    if (offer.donor->status.state == DonorState::kPending && offer.donor->status.armed == offer.armed) {
      left.push_back(&offer);
      donors.push_back(offer.donor);
    }
  }
  const auto is_over = [](const Refusal& refusal) REQUIRES(registry_mutex) {
    return refusal.donor->status.state != DonorState::kPending || refusal.donor->status.armed;
  };
  refused.erase(std::remove_if(refused.begin(), refused.end(), is_over), refused.end());
  for (const Refusal& refusal : refused) {
    not_offered.push_back(refusal.donor);
  }
  if (donors.empty() && not_offered.empty()) {
    return {};
  }
  auto step = std::make_shared<Step>(next_step_, std::move(donors), std::move(not_offered));
  step->tallies = Tallies::Get().OfThisThread();
  std::vector<std::shared_ptr<abi::TensorData>> tensors;
  tensors.reserve(step->donors.size());
  for (const DonorPtr& donor : step->donors) {
    donor->AddTensors(tensors);
  }
  std::size_t noted = 0;
  try {
    for (; noted < left.size(); ++noted) {
      const DonorPtr& donor = left[noted]->donor;
      if (!donor->array.automatic) {  // no tensor holds an automatic donor, so no use can be checked
        consumed_.insert_or_assign(donor->array.key, Consumed{donor, step, donor->buffer});
      }
    }
  } catch (...) {
    while (noted-- > 0) {
      consumed_.erase(left[noted]->donor->array.key);
    }
    throw;
  }
  // Nothing throws from here on.
  ++next_step_;
  last_claimed_ = step;
  has_steps_.store(true, std::memory_order_relaxed);
  for (const std::weak_ptr<StepTally>& tally : step->tallies) {
    ++tally.lock()->counts.steps;
  }
  for (OpenCall& call : OpenCalls()) {
    call.step = step;
  }
  for (const Offer* offer : left) {
    DonorStatus& status = offer->donor->status;
    status.state = DonorState::kClaimed;
    status.armed = false;
    status.parameter = offer->parameter;
    status.preferred_output = offer->preferred_output;
    status.requested = offer->requested;
    if (!offer->donor->array.automatic) {
      Marks::Get().Remove(*offer->donor);
    }
  }
  Refuse(refused);
  if (step->donors.empty()) {
    step->status = Step::Status::kDone;
    Keep(step);
  }
  Refresh();
  return {step, std::move(tensors)};
}

void Steps::Refuse(std::vector<Refusal>& refused) noexcept {
  for (Refusal& refusal : refused) {
    DonorStatus& status = refusal.donor->status;
    status.state = DonorState::kUnusable;
    status.reason = std::move(refusal.reason);
    status.reported = !refusal.notify;
    Marks::Get().Remove(*refusal.donor);
  }
}

void Steps::AddUnread(const StepPtr& step, std::vector<Refusal> unread) {
  std::vector<DonorPtr> donors;
  for (const Refusal& refusal : unread) {
    donors.push_back(refusal.donor);
  }
  step->unread.insert(step->unread.end(), donors.begin(), donors.end());
  // Nothing throws from here on. The step may still run, and its end counts and reports its other donors.
  Refuse(unread);
  try {
    Report(step, donors);
  } catch (const std::bad_alloc&) {
    Tallies::Get().NoteLoss();
  }
}

void Steps::Report(const StepPtr& step, const std::vector<DonorPtr>& donors) {
  Tallies::Count(step, donors);
  if (IsToReport(donors) && std::find(notices_.begin(), notices_.end(), step) == notices_.end()) {
    notices_.push_back(step);
  }
}

void Steps::Keep(const StepPtr& step) noexcept {
  try {
    kept_.push_back(step);
    if (kept_.size() > kMostKept) {
      kept_.pop_front();
    }
    Report(step, step->donors);
    Report(step, step->refused);
  } catch (const std::bad_alloc&) {
    Tallies::Get().NoteLoss();  // the report misses the step
  }
}

void Steps::Commit(const StepPtr& step, std::string graph_hash, const std::vector<lazy::BackendDataPtr>& outputs) {
  MutexLock lock(registry_mutex);
  step->consumed.reserve(step->donors.size());
  last_consumed_.try_emplace(step->donors.front()->array.device);
  step->outputs.assign(outputs.begin(), outputs.end());
  const auto known = outcomes_.find(graph_hash);
  if (known != outcomes_.end() && known->second->used.size() == step->donors.size()) {
    step->outcome = known->second;
    for (std::size_t i = 0; i < step->donors.size(); ++i) {
      step->donors[i]->status.left_unused = !known->second->used[i];
    }
  }
  running_.insert(step->number);
  step->graph_hash = std::move(graph_hash);
  AddCompilations(step->compilations);
  step->status = Step::Status::kRunning;
}

void Steps::NoteExecutable(const StepPtr& step, const std::shared_ptr<const abi::HostCachedComputation>& executable) {
  MutexLock lock(registry_mutex);
  step->executable = executable;
}

std::shared_ptr<GraphOutcome> Steps::DescribeOutcome(const Step& step) const {
  auto outcome = std::make_shared<GraphOutcome>();
  outcome->used = step.used;
  std::vector<std::weak_ptr<lazy::BackendData>> outputs;
  {
    MutexLock lock(registry_mutex);
    // torch_xla may have dropped the executable, and compiled the graph again.
    if (step.outcome != nullptr && step.outcome->used == step.used &&
        step.outcome->executable.lock() == step.executable.lock()) {
      return nullptr;
    }
    outcome->executable = step.executable;
    outputs = step.outputs;
  }
  const auto describe = [](const lazy::BackendDataPtr& buffer) {
    return buffer != nullptr ? abi::DescribeBuffer(*buffer) : std::string();
  };
  for (const DonorPtr& donor : step.donors) {
    const std::string array = describe(donor->buffer.lock());
    outcome->donors.push_back(IsSharded(array) ? array : std::string());
  }
  if (std::find(step.used.begin(), step.used.end(), false) != step.used.end()) {
    for (const auto& weak : outputs) {
      outcome->outputs.push_back(describe(weak.lock()));
    }
  }
  return outcome;
}

void Steps::RecordOutcome(const StepPtr& step, const Reason& failure) noexcept {
  // Before the lock is taken, because HasValue() calls the host.
  for (std::size_t i = 0; i < step->donors.size(); ++i) {
    lazy::BackendDataPtr buffer = step->donors[i]->buffer.lock();
    // The running step holds its parameters, so the buffer exists. A missing one could not be used anyway.
    step->used[i] = buffer == nullptr || !buffer->HasValue();
    if (step->used[i]) {
      step->consumed.push_back(std::move(buffer));
    }
  }
  std::shared_ptr<GraphOutcome> outcome;
  try {
    outcome = failure.empty() ? DescribeOutcome(*step) : nullptr;
  } catch (const std::exception& error) {  // a reason may lack a size, but the step must end
    Tallies::Get().NoteError(error.what());
  }
  std::vector<lazy::BackendDataPtr> consumed = std::move(step->consumed);  // destroyed without the lock: it may wait
  MutexLock lock(registry_mutex);
  Finish(step, std::move(outcome), failure);
  if (failure.empty()) {
    last_consumed_.find(step->donors.front()->array.device)->second.swap(consumed);
  }
}

std::vector<lazy::BackendDataPtr> Steps::TakeConsumed(const lazy::BackendDevice& device) noexcept {
  if (!has_steps_.load(std::memory_order_relaxed)) {
    return {};
  }
  MutexLock lock(registry_mutex);
  const auto found = last_consumed_.find(device);
  return found == last_consumed_.end() ? std::vector<lazy::BackendDataPtr>() : std::exchange(found->second, {});
}

void Steps::Abandon(const StepPtr& step, const Reason& failure) noexcept {
  MutexLock lock(registry_mutex);
  if (step->status != Step::Status::kDone) {
    step->used.assign(step->donors.size(), false);
    Finish(step, nullptr, failure);
  }
}

bool Steps::IsUnusable(const Donor& donor) const {
  MutexLock lock(registry_mutex);
  return donor.status.state == DonorState::kUnusable;
}

void Steps::Finish(const StepPtr& step, std::shared_ptr<const GraphOutcome> outcome, const Reason& failure) noexcept {
  if (step->status == Step::Status::kDone) {
    return;  // a run that the host drops may end twice
  }
  const bool was_running = step->status == Step::Status::kRunning;
  if (!was_running) {
    AddCompilations(step->compilations);  // its compilation may have failed
  }
  for (std::size_t i = 0; i < step->donors.size(); ++i) {
    Donor& donor = *step->donors[i];
    DonorStatus& status = donor.status;
    status.state = step->used[i] ? DonorState::kDonated : DonorState::kUnusable;
    status.left_unused = false;
    if (step->used[i]) {
      donor.ForgetObjects();
      continue;
    }
    consumed_.erase(donor.buffer.lock().get());
    if (!failure.empty()) {
      Set(status.reason, failure);
      status.reported = true;  // the failure itself is raised by torch_xla
    }
  }
  step->status = Step::Status::kDone;
  step->outputs.clear();
  if (outcome != nullptr) {
    step->outcome = outcome;
    try {
      if (outcomes_.insert_or_assign(step->graph_hash, std::move(outcome)).second) {
        outcome_order_.push_back(step->graph_hash);
        if (outcome_order_.size() > kKeptOutcomes) {
          outcomes_.erase(outcome_order_.front());
          outcome_order_.pop_front();
        }
      }
    } catch (const std::bad_alloc&) {
      Tallies::Get().NoteLoss();  // the next run of the graph computes the outcome again
    }
  }
  Keep(step);
  if (was_running) {
    running_.erase(step->number);
  }
  Refresh();
  ended_.notify_all();
}

// ---- Steps without donors ----

void Steps::AddCompilations(std::uint64_t& counter) {
  const std::uint64_t now = abi::Compilations();
  counter += now < compilations_ ? now : now - compilations_;  // fewer if the program has cleared torch_xla's counters
  compilations_ = now;
}

void Steps::CountRun(bool is_step) {
  std::vector<OpenCall>& calls = OpenCalls();
  if (is_step && !calls.empty()) {
    calls.back().has_plain_run = true;
    return;
  }
  MutexLock lock(registry_mutex);
  CountRunLocked(is_step);
}

void Steps::CountRunLocked(bool is_step) {
  std::deque<std::uint64_t>& plain = last_claimed_->plain_steps;
  if (is_step) {
    plain.push_back(0);
  }
  AddCompilations(plain.empty() ? last_claimed_->compilations : plain.back());
  if (plain.size() > kMostKept) {
    plain.pop_front();
  }
  if (is_step) {
    Tallies::Get().CountPlainStep();
  }
}

// ---- For readers ----

StepSnapshot Steps::Snapshot(const Step& step) const {
  StepSnapshot snapshot;
  snapshot.number = step.number;
  snapshot.graph_hash = step.graph_hash;
  snapshot.compilations = step.compilations;
  snapshot.plain_steps = step.plain_steps;
  snapshot.donors.reserve(step.donors.size() + step.refused.size() + step.unread.size());
  for (const std::vector<DonorPtr>* donors : {&step.donors, &step.refused, &step.unread}) {
    for (const DonorPtr& donor : *donors) {
      snapshot.donors.emplace_back(*donor);
    }
  }
  if (step.outcome != nullptr) {
    snapshot.outputs = step.outcome->outputs;
    for (std::size_t i = 0; i < step.donors.size(); ++i) {
      snapshot.donors[i].array = step.outcome->donors[i];
    }
  }
  return snapshot;
}

std::vector<StepSnapshot> Steps::Snapshots(const std::vector<StepPtr>& steps) const {
  MutexLock lock(registry_mutex);
  std::vector<StepSnapshot> result;
  for (const StepPtr& step : steps) {
    result.push_back(Snapshot(*step));
  }
  return result;
}

std::vector<StepPtr> Steps::Kept() const {
  MutexLock lock(registry_mutex);
  return {kept_.begin(), kept_.end()};
}

std::optional<std::string> Steps::GraphText(const std::string& graph_hash) const {
  std::shared_ptr<const abi::HostCachedComputation> executable;
  {
    MutexLock lock(registry_mutex);
    const auto found = outcomes_.find(graph_hash);
    executable = found == outcomes_.end() ? nullptr : found->second->executable.lock();
  }
  return executable == nullptr ? std::nullopt : std::optional(abi::DescribeGraph(*executable).text);
}

void Steps::Wait() {
  MutexLock lock(registry_mutex);
  const std::uint64_t later = next_step_;
  while (!running_.empty() && *running_.begin() < later) {
    registry_mutex.Wait(ended_);
  }
}

std::vector<StepSnapshot> Steps::TakeNotices(const std::optional<lazy::BackendDevice>& device) {
  MutexLock lock(registry_mutex);
  std::vector<StepSnapshot> result;
  std::deque<StepPtr> taken, others;
  for (const StepPtr& step : notices_) {
    const auto& donors = step->donors.empty() ? step->refused : step->donors;
    const bool is_other = device.has_value() && !(donors.front()->array.device == *device);
    (is_other ? others : taken).push_back(step);
    if (!is_other) {
      result.push_back(Snapshot(*step));
    }
  }
  for (const StepPtr& step : taken) {
    for (const std::vector<DonorPtr>* donors : {&step->donors, &step->refused, &std::as_const(step->unread)}) {
      for (const DonorPtr& donor : *donors) {
        donor->status.reported = donor->status.reported || donor->status.state == DonorState::kUnusable;
      }
    }
  }
  notices_ = std::move(others);
  Refresh();
  return result;
}

Steps::Counts Steps::Size() const {
  MutexLock lock(registry_mutex);
  std::size_t just_consumed = 0;
  for (const auto& [device, buffers] : last_consumed_) {
    just_consumed += buffers.size();
  }
  return {consumed_.size(), just_consumed, undonated_.size(), kept_.size(), outcomes_.size()};
}

}  // namespace torch_xla_donate
